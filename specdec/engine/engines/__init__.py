"""Whole engines, made of the parts in the other rooms: torch on one device or several, and what loads them all."""
