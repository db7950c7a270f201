//! A bulk loader: a whole btrfs image from sorted entries, each block written once, bottom up.
