//! What every other room stands on, and what knows none of them.
//!
//! | module | decision it hides |
//! |---|---|
//! | [`api`] | the types of the facade, and what a caller may wait for |
//! | [`error`] | what can go wrong, and where |
//! | `completion` | how a caller learns that something has come to its end |
//! | `hash` | how numbers are looked up fast |
//! | `lock`, `logging`, [`watch`] | the order of locks, how it is checked; what must not happen |
//! | `side_by_side` | work on many things by a few threads |
//! | `sectors` | where sectors of a file begin and end |
//! | `budget` | how the cache size is divided |
//! | `tuning` | what tests and benchmarks make the engine do otherwise; `fault!` |
//!
//! The crate's root brings most of these names in, so they are `crate::error`, `crate::lock` and so
//! on.

#[macro_use]
pub(crate) mod tuning;

pub mod api;
pub(crate) mod budget;
pub(crate) mod completion;
pub mod error;
pub(crate) mod hash;
pub(crate) mod lock;
pub(crate) mod logging;
pub(crate) mod sectors;
pub(crate) mod side_by_side;
pub mod watch;
