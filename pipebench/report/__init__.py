"""Tables, pictures and a page about a sweep, made from its files alone and without torch."""
