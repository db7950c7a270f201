//! Where the operating system has no rings.

use crate::device::{Read, Write};
use std::fs::File;
use std::io;

/// How a transfer ended.
#[derive(Debug)]
pub(crate) enum Ended {
    Whole,
    InPart,
    Failed(io::Error),
}

/// No rings.
#[derive(Debug, Default)]
pub(crate) struct Rings;

impl Rings {
    pub(crate) fn make(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    pub(crate) fn read(
        &self,
        _: &mut [(&File, &mut [Read<'_>])],
        _: Option<&mut dyn FnMut()>,
    ) -> Option<Vec<Vec<Ended>>> {
        None
    }
    pub(crate) fn write(
        &self,
        _: &[(&File, &[Write<'_>])],
        _: Option<&mut dyn FnMut()>,
    ) -> Option<Vec<Vec<Ended>>> {
        None
    }
    pub(crate) fn flush(
        &self,
        _: &[&File],
        _: Option<&mut dyn FnMut()>,
    ) -> Option<Vec<io::Result<()>>> {
        None
    }
}
