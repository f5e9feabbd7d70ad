"""References of a second hand: float64 torch, one sequence at a time, written as the textbook has it."""
