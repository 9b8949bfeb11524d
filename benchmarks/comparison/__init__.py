"""What benchmarks/compare.py is made of: inputs, contestants, measurement, judgement, report."""
