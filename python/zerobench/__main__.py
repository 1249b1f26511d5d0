"""`python -m zerobench` is the command `zerobench`."""

from zerobench.cli.main import main

if __name__ == "__main__":
    main()
