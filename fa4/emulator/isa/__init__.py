"""The instruction table: every PTX instruction the emulator executes, and what it does."""
