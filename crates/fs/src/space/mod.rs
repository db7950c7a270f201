//! Space: block groups, the free-space tree, extents and their references.
