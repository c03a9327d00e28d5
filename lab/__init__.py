"""What measures and confirms: who imports whom, which records there are, what they were made from.

Needs the standard library alone, and nothing of it is part of the package.
"""
