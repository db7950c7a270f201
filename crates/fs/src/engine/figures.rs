//! Figures for statistics: a struct whose fields say where they come from.

/// Defines a struct of figures and the function `of` that gathers them. Each field has its
/// expression behind it, so there is one list and not three.
macro_rules! figures {
    (
        $(#[$meta:meta])*
        pub struct $name:ident of $source:ident: $kind:ty {
            $($(#[$doc:meta])* $field:ident: $type:ty = $value:expr,)*
        }
    ) => {
        $(#[$meta])*
        pub struct $name {
            $($(#[$doc])* pub $field: $type,)*
        }
        impl $name {
            pub(crate) fn of($source: $kind) -> Self {
                // One after the other: a lock that one value takes is not held for the next.
                $(let $field = $value;)*
                Self { $($field,)* }
            }
        }
    };
}

use std::sync::atomic::{AtomicU64, Ordering};

/// What a counter says now.
pub(crate) fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
