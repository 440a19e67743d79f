"""What SPIN and its operations are compared with."""
