"""A hybrid of recurrent and attention layers, made of the bundled reader."""
