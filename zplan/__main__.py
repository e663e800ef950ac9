"""`python -m zplan`."""

from zplan.cli import main

if __name__ == "__main__":
    main()
