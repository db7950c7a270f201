//! Devices that are added, removed and resized by a daemon.
//!
//! It says how far it is as long as it works. When the requester has gone, or a signal came there,
//! or the image is about to be closed, it stops: what has moved until then stays where it is. The
//! file system lets one change run at a time, and says which other work is in its way.

use crate::conduit::{Ended, Outlet};
use crate::device_changes::carry_out;
use crate::device_orders::Order;
use larder_fs::{Clearing, Filesystem};
use larder_volume::{Device, FileDevice};
use serde_json::json;
use std::io::Write;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[derive(Debug, Default)]
pub(super) struct DeviceChanges {
    /// What is under way is to stop.
    ended: AtomicBool,
}

impl DeviceChanges {
    /// Does what is wanted, and says what came of it.
    ///
    /// # Errors
    /// What is refused.
    pub(super) fn obey(
        &self,
        fs: &Filesystem,
        order: &Order,
        device: Option<FileDevice>,
        outlet: &Outlet,
    ) -> anyhow::Result<()> {
        let device = device.map(|device| Arc::new(device) as Arc<dyn Device>);
        let mut watch = |Clearing { total, left }| {
            let mut out = outlet;
            let line = format!("{}\n", json!({ "total": total, "left": left }));
            let goes_on = out.write_all(line.as_bytes()).is_ok() && !outlet.is_left();
            if goes_on && !self.ended.load(Relaxed) {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        };
        let summary = carry_out(fs, order, device, &mut watch)?;
        outlet.conclude(&Ended::Complete { summary: serde_json::to_value(summary)? });
        Ok(())
    }

    /// Has it stop.
    pub(super) fn end(&self) {
        self.ended.store(true, Relaxed);
    }
}
