"""`python -m draftline`: the `draftline` command."""

from .deploy.cli.main import main

if __name__ == "__main__":
    main()
