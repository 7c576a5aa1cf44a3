"""PinnerFormer's science and data plane: no orchestrator, no tracker, no environment, no global path."""
