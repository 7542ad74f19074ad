"""The bundled demo model: a small Llama trained here on Python's documentation, and the scripts that made it."""

from pathlib import Path

DEMO_MODEL_DIR = Path(__file__).resolve().parent / "gatehouse-demo"
