"""The bundled demo pair: a small target and a smaller draft, trained here on the standard library."""
