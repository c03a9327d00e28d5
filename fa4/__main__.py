"""`python -m fa4`: the `fa4` command of this interpreter."""

from fa4.cli import main

if __name__ == "__main__":
    main()
