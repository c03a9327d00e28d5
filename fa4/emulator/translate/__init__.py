"""From a parsed kernel to a program: registers as LLVM code, the rest as bound handlers."""
