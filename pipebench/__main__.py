"""`python -m pipebench`. Workers import this file again as their main module, so it must import nothing at the top."""

if __name__ == "__main__":
    import sys

    from pipebench.cli import main

    sys.exit(main())
