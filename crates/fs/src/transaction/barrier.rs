//! The durability barrier: what is on the device before what.
//!
//! Four rules make a crash harmless, and this module keeps them.
//!
//! - A superblock is written only when everything it leads to is durable: flush, superblocks,
//!   flush.
//! - Superblocks are written in order. A log is attached to the superblock of the transaction
//!   before its own. That superblock is never written after the one of the log's own transaction. A
//!   thread that writes either holds [`SuperblockWritten`].
//! - A device that is new has its superblock before the others count it: flush, superblocks of new
//!   devices, flush, all superblocks, flush. So a crash leaves no file system that misses a device.
//!   A device that joins has one of the last commit even before, and may fail in the commit that
//!   counts it: then it is behind, and not missing.
//! - The superblocks of a commit name the devices that have failed by the first flush. So these are
//!   told from devices that a power cut keeps from their superblock ([`larder_format::failed`]).
//!
//! A flush counts as good only if no early flush failed beside it: see [`super::early_flush`].

use crate::error::{Error, Result};
use crate::transaction::{Ground, SuperblockWritten, Superblocks};
use crate::tree::Pointer;
use larder_format::{DevItem, Generation};
use larder_volume::superblock::{SuperCopies, write_superblocks};
use larder_volume::{Device, VolumeError, VolumeResult};
use zerocopy::little_endian::U64;

impl Ground {
    /// Makes everything durable whose writing had completed before the call.
    ///
    /// # Errors
    /// The device's; `ReadOnly` after an early flush that failed.
    pub(crate) fn flush(&self) -> Result<()> {
        self.volume.flush()?;
        if self.flushes.settle() { Ok(()) } else { Err(Error::ReadOnly(self.txns.failure())) }
    }

    /// Makes everything written so far durable, then writes the superblock of the transaction
    /// `generation`, then makes that durable, too.
    pub(super) fn write_superblocks(
        &self,
        generation: Generation,
        superblocks: Superblocks,
    ) -> Result<()> {
        // A log's superblock is of the transaction before, so it is never written after this one.
        let mut written = self.superblock_written.lock();
        let superblocks = if self.has_target_of(&superblocks) {
            superblocks
        } else {
            superblocks.without_target()
        };
        let superblocks = self.flush_around(superblocks)?;
        *written = SuperblockWritten { generation, superblocks, logs: 0 };
        Ok(())
    }

    /// Is the target that these superblocks know still there? It may have become a device, or have
    /// been given up, since the commit was sealed, and another replacement may have begun.
    fn has_target_of(&self, superblocks: &Superblocks) -> bool {
        let now = self.replacement.target();
        self.volume.target().is_some() && now.is_none_or(|now| superblocks.is_of_target(now))
    }

    /// Makes the superblock durable on all devices that the file system is opened with, before
    /// anything else is written. A power cut may have left it on some of them only. The others
    /// would lead to what is overwritten from now on, if those were lost. The target of a
    /// replacement may have a newer one, and Linux would go by that.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn agree_on_superblock(&self) -> Result<()> {
        let alone = self.volume.devices().nth(1).is_none() && self.volume.target().is_none();
        if alone || self.read_only.is_some() || fault!(self.options.tuning, SuperblockOnSome) {
            return Ok(());
        }
        let written = self.superblock_written.lock();
        let superblocks = &written.superblocks;
        self.volume.write_superblocks(&|id| superblocks.of(id), SuperCopies::All)?;
        self.flush()
    }

    /// Gives a device that is about to join a superblock of the last commit, durably. The file
    /// system does not know the device yet, and is opened without it after a crash.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn introduce(&self, device: &dyn Device, item: &DevItem) -> Result<()> {
        if fault!(self.options.tuning, DeviceCountedFirst) {
            return Ok(());
        }
        let mut superblock = self.superblock_written.lock().superblocks.common.clone();
        superblock.dev_item = *item;
        superblock.log_root = U64::new(0);
        superblock.log_root_level = 0;
        write_superblocks(device, &superblock, SuperCopies::All)?;
        device.flush().map_err(|e| VolumeError::flush(device, e).into())
    }

    /// Returns the superblocks that it has written: if the target of a replacement fails as it
    /// takes the place of a device, that device has the superblock.
    fn flush_around(&self, mut superblocks: Superblocks) -> Result<Superblocks> {
        let tuning = &self.options.tuning;
        let which =
            if fault!(tuning, NoSuperMirrors) { SuperCopies::Primary } else { SuperCopies::All };
        let write = |superblocks: &mut Superblocks| -> Result<()> {
            if !self.put_on_new(superblocks)? {
                *superblocks = superblocks.clone().with_source_again();
                self.put_on_new(superblocks)?;
            }
            let done = self.put(superblocks, which);
            if !fault!(tuning, IgnoreWriteErrors) {
                done?;
            }
            Ok(())
        };
        if fault!(tuning, SuperFirst) {
            write(&mut superblocks)?;
            self.flush()?;
            return Ok(superblocks);
        }
        if !fault!(tuning, NoFlushBeforeSuper) {
            let done = self.flush();
            if !fault!(tuning, IgnoreWriteErrors) {
                done?;
            }
        }
        if !fault!(tuning, FailedUnnamed) {
            superblocks = superblocks.with_failed(|id| self.volume.takes_writes(id));
        }
        write(&mut superblocks)?;
        if !fault!(tuning, NoFlushAfterSuper) {
            let done = self.flush();
            if !fault!(tuning, IgnoreWriteErrors) {
                done?;
            }
        }
        Ok(superblocks)
    }

    /// Writes the superblock of the last commit with a log attached, the log of the transaction
    /// `generation`. Returns false if the commit of that transaction has written its superblock
    /// already. The caller has made the log's nodes and data durable.
    pub(crate) fn write_log_superblock(
        &self,
        generation: Generation,
        root: &Pointer,
    ) -> Result<bool> {
        let mut written = self.superblock_written.lock();
        if written.generation >= generation {
            return Ok(false);
        }
        written.logs += 1;
        let (before, number) = (&written.superblocks, written.logs);
        let follows = before.common.generation.get() + 1 == generation.0;
        assert!(
            follows || fault!(self.options.tuning, LogEarlySuper),
            "a log hangs on the superblock before it"
        );
        let superblocks = before.with_log(|superblock| {
            superblock.log_root = U64::new(root.at.0);
            superblock.log_root_level = root.level;
            superblock.set_log_number(number);
        });
        self.put(&superblocks, SuperCopies::Primary)?;
        Ok(true)
    }

    /// Makes the superblocks of devices durable that are new. False if a target that is to take the
    /// place of a device has failed.
    fn put_on_new(&self, superblocks: &Superblocks) -> Result<bool> {
        let new = superblocks.new_devices();
        if new.is_empty() || fault!(self.options.tuning, DeviceCountedFirst) {
            return Ok(true);
        }
        let is_well = || !superblocks.target_takes_over() || self.volume.target_takes_writes();
        // It may lack what the superblock leads to.
        if !is_well() {
            return Ok(false);
        }
        let of = |id| superblocks.of(id).filter(|_| new.contains(&id));
        self.volume.write_superblocks(&of, SuperCopies::All)?;
        self.flush()?;
        Ok(is_well())
    }

    /// Writes to each device its own superblock.
    fn put(&self, superblocks: &Superblocks, which: SuperCopies) -> VolumeResult<()> {
        if fault!(self.options.tuning, SuperOnOneDevice)
            && let Some((id, device)) = self.volume.devices().next()
            && let Some(superblock) = superblocks.of(id)
        {
            return write_superblocks(&*device, &superblock, which);
        }
        if fault!(self.options.tuning, SuperblockOnSome) {
            let behind = self.volume.behind();
            let mut others = self.volume.devices().filter(|(id, _)| !behind.contains(id));
            return others.try_for_each(|(id, device)| match superblocks.of(id) {
                Some(superblock) => write_superblocks(&*device, &superblock, which),
                None => Ok(()),
            });
        }
        self.volume.write_superblocks(&|id| superblocks.of(id), which)
    }
}
