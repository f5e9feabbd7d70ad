"""What tests, benchmarks and tuning share: named cases, inputs that expose faults, and the comparison."""
