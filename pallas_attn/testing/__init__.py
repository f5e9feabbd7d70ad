"""What tests, benchmarks and tuning share: named cases, and the comparison."""
