//! The attributes that a command can have: their numbers and names.

use std::fmt;

macro_rules! attributes {
    ($($name:ident = $number:literal $text:literal),* $(,)?) => {
        /// What an attribute says.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Attribute { $($name = $number),* }

        impl Attribute {
            pub(crate) fn from_number(number: u16) -> Option<Self> {
                match number { $($number => Some(Self::$name),)* _ => None }
            }
        }

        impl fmt::Display for Attribute {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$name => $text),* })
            }
        }
    };
}

attributes! {
    Uuid = 1 "uuid", Ctransid = 2 "ctransid", Ino = 3 "ino", Size = 4 "size", Mode = 5 "mode",
    Uid = 6 "uid", Gid = 7 "gid", Rdev = 8 "rdev", Ctime = 9 "ctime", Mtime = 10 "mtime",
    Atime = 11 "atime", Otime = 12 "otime", XattrName = 13 "xattr name",
    XattrData = 14 "xattr data", Path = 15 "path", PathTo = 16 "path to", PathLink = 17 "path link",
    FileOffset = 18 "file offset", Data = 19 "data", CloneUuid = 20 "clone uuid",
    CloneCtransid = 21 "clone ctransid", ClonePath = 22 "clone path",
    CloneOffset = 23 "clone offset", CloneLen = 24 "clone length",
    FallocateMode = 25 "fallocate mode", Fileattr = 26 "fileattr",
    UnencodedFileLen = 27 "unencoded file length", UnencodedLen = 28 "unencoded length",
    UnencodedOffset = 29 "unencoded offset", Compression = 30 "compression",
    Encryption = 31 "encryption",
}
