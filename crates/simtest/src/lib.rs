//! Crash simulation: a disk in memory, the states that a power cut can leave on it, and what each
//! of them must show.
//!
//! Nothing in the product depends on this crate. It replaces the disk ([`larder_volume::Device`]),
//! runs workloads on the engine, cuts the power at every point, and checks that what a completed
//! `fsync` or `sync` promised is there:
//!
//! - [`image`]: what a disk holds, cheap to copy; [`device`]: the disk, which records, fails and
//!   waits as told;
//! - [`ops`]: operations and the notation for workloads; [`world`]: a tree of files, and what
//!   operations do to it;
//! - [`model`]: what was promised when, and what a disk must therefore show; [`walk`]: what it does
//!   show;
//! - [`crash`]: from a recording to the disks that a power cut can leave;
//! - [`workload`], [`scenarios`], [`data`], [`sharing`], [`cloning`]: what is tried; [`runner`]:
//!   tries it, and has each crash state looked at by [`judge`];
//! - [`recorded`]: the disk as a file for the system's own file systems, so that their crashes are
//!   known as well;
//! - [`memserver`]: a file system in memory, behind which the transports of FUSE are tested and
//!   measured;
//! - [`faults`]: the same on a device that fails; [`disks`]: on several disks, of which some are
//!   lost, old or damaged; [`fragile`]: an image file that fails;
//! - [`moving`]: moves of data beside workloads: relocation, balances, changes of devices;
//! - [`rows`]: power cuts of several devices, of which some are then lost, where there is parity;
//! - [`damage`]: an editor that changes one thing of an image, for what checkers must find;
//! - [`formats`]: the kinds of image that workloads run on;
//! - [`lineage`]: random histories of a subvolume, told by snapshots, for streams;
//! - [`by_hand`]: short ways for tests that use an engine by hand;
//! - [`fill`]: filling and emptying a disk from many threads;
//! - [`hostile`]: images and bytes that are made to do harm, for fuzzers and for tests;
//! - [`oracle`]: Linux's own btrfs as the judge of images and trees.

pub mod by_hand;
pub mod cloning;
pub mod crash;
pub mod damage;
pub mod data;
pub mod device;
pub mod disks;
pub mod faults;
pub mod fill;
pub mod formats;
pub mod fragile;
pub mod hostile;
pub mod image;
pub mod judge;
pub mod lineage;
pub mod memserver;
pub mod model;
pub mod moving;
pub mod ops;
pub mod oracle;
pub mod recorded;
pub mod rows;
pub mod runner;
pub mod scenarios;
pub mod sharing;
pub mod walk;
pub mod workload;
pub mod world;
