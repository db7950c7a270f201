//! Ending work early: a question that long loops ask now and then.

use crate::{Error, Result};
use std::sync::Arc;

/// Says whether work is to end. The default never says so.
#[derive(Clone, Default)]
pub struct Stop(Option<Arc<dyn Fn() -> bool + Send + Sync>>);

impl Stop {
    /// Work ends when `asked` says so. It is asked often.
    pub fn when(asked: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(asked)))
    }

    /// Goes on unless the work is to end.
    pub(crate) fn check(&self) -> Result<()> {
        if self.0.as_ref().is_some_and(|asked| asked()) { Err(Error::Stopped) } else { Ok(()) }
    }
}

impl std::fmt::Debug for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stop").finish_non_exhaustive()
    }
}
