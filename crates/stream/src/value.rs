//! The types that an attribute's value can have, as bytes.

use larder_format::items::Timespec;
use larder_format::{Generation, ObjectId};

/// A value of an attribute.
pub(crate) trait Value<'a>: Sized {
    /// From its bytes; nothing if there are too few or too many.
    fn read(bytes: &'a [u8]) -> Option<Self>;
    /// Appends its bytes.
    fn write(&self, to: &mut Vec<u8>);
    /// What it is where the attribute is missing; nothing if the attribute has to be there.
    fn missing() -> Option<Self> {
        None
    }
    /// True if the attribute is left out.
    fn is_missing(&self) -> bool {
        false
    }
}

impl<'a> Value<'a> for &'a [u8] {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        Some(bytes)
    }
    fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(self);
    }
}

impl<'a> Value<'a> for [u8; 16] {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        bytes.try_into().ok()
    }
    fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(self);
    }
}

macro_rules! numbers {
    ($($t:ty => $raw:ty, $from:expr, $to:expr;)*) => {$(
        impl<'a> Value<'a> for $t {
            fn read(bytes: &'a [u8]) -> Option<Self> {
                Some($from(<$raw>::from_le_bytes(bytes.try_into().ok()?)))
            }
            fn write(&self, to: &mut Vec<u8>) {
                to.extend_from_slice(&$to(self).to_le_bytes());
            }
        }
    )*};
}

numbers! {
    u64 => u64, |v| v, |v: &u64| *v;
    u32 => u32, |v| v, |v: &u32| *v;
    Generation => u64, Generation, |v: &Generation| v.0;
    ObjectId => u64, ObjectId, |v: &ObjectId| v.0;
}

impl<'a> Value<'a> for Timespec {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        let (sec, nsec) = bytes.split_first_chunk()?;
        Some(Self::new(i64::from_le_bytes(*sec), u32::from_le_bytes(nsec.try_into().ok()?)))
    }
    fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.sec.get().to_le_bytes());
        to.extend_from_slice(&self.nsec.get().to_le_bytes());
    }
}

impl<'a, T: Value<'a>> Value<'a> for Option<T> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        T::read(bytes).map(Some)
    }
    fn write(&self, to: &mut Vec<u8>) {
        if let Some(value) = self {
            value.write(to);
        }
    }
    fn missing() -> Option<Self> {
        Some(None)
    }
    fn is_missing(&self) -> bool {
        self.is_none()
    }
}
