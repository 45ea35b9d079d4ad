"""Staged writes: what a plugin writes goes to a layer of its own, and a person takes what is good.

store.py   the changesets: where the layers of launches are kept until they are applied or discarded
layer.py   what a layer changes of its folder, and what of that may not be applied
apply.py   from the layer to the folder
journal.py what an application has done, for the next one
text.py    the difference as text
"""
