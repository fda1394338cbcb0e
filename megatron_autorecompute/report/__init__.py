"""What a person looks at: computing (`timeline`, `data`) and rendering (all else) are apart.

A renderer takes what was computed or a plan and knows nothing else.
"""
