"""What runs in the guest."""
