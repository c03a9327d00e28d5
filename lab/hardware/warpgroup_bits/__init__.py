"""The Hopper forward kernel on a GPU and in the emulator: the same code, the same bits?"""
