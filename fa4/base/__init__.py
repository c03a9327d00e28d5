"""What every part may use: files that users name, pictures' looks, kept code, interrupts."""
