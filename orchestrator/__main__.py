"""``python -m orchestrator``."""

from orchestrator.cli import entrypoint

if __name__ == "__main__":
    entrypoint()
