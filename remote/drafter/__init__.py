"""The bundled DFlash trainer. Every module but this one needs torch."""
