//! Balance: block groups are relocated because of what they are or should be.
//!
//! A balance chooses chunks by filters and relocates each ([`crate::relocate`]). What it moves
//! finds room in other chunks, so nearly empty ones are given back to the devices; or it goes to
//! chunks of another profile, which is a conversion. An item in the root tree says what is under
//! way, from the start to the end. So a balance survives the mount, a crash, and the change to
//! Linux and back.
//!
//! | module | decision it hides |
//! |---|---|
//! | `filters` | which chunks a balance is for |
//! | `words` | how people write filters |
//! | `item` | how the file system remembers a balance |
//! | `control` | how a balance is watched, paused and cancelled |
//! | `groups` | what filters are told of chunks |
//! | `allowed` | which balances are refused |
//! | `plan` | what a balance could free |
//! | `run` | what is done in which order, and what happens at the end |
//! | `reclaim` | which chunks are freed in the background |
//!
//! `docs/BALANCE.md` has the rules.

mod allowed;
mod control;
mod filters;
mod groups;
mod item;
mod plan;
mod reclaim;
mod run;
mod words;

pub use allowed::DataMay;
pub use control::{BalanceControl, BalanceState, BalanceStatus};
pub use filters::{BalanceWish, Convert, Filters, Span};
pub(crate) use item::stored;
pub(crate) use plan::plan;
pub use plan::{BalancePlan, Freeing};
pub(crate) use reclaim::Reclaim;
pub(crate) use run::{cancel_paused, go_on_converting, paused, resume, start};
