"""HarnessRL trains the model inside any AI agent, in the harness that the agent runs in production."""

__version__ = "0.1.0"
__all__ = ["__version__"]
