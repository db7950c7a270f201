//! What `larder inspect`, `check`, `map` and `restore` print of a hostile image.
//!
//! This crate does not know the command line: the caller passes a function that runs one. An input
//! makes an image of a seed and chooses command lines. The image is a file without a name, which
//! commands open through `/proc`.

use super::survey::Survey;
use super::{limits, mutate};
use crate::image::Image;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Runs a command line in this process; its output does not matter.
pub type Run<'a> = &'a mut dyn FnMut(Vec<OsString>) -> Result<(), String>;

/// Command lines; `@` is the image, `#` an address or number.
const LINES: [&[&str]; 22] = [
    &["inspect", "tree", "--tree", "root", "@"],
    &["inspect", "tree", "--tree", "root", "--json", "@"],
    &["inspect", "tree", "--tree", "extent", "@"],
    &["inspect", "tree", "--tree", "fs", "@"],
    &["inspect", "tree", "--tree", "fs", "--json", "@"],
    &["inspect", "tree", "--tree", "chunk", "--json", "@"],
    &["inspect", "tree", "--tree", "#", "@"],
    &["inspect", "tree", "--block", "#", "@"],
    &["inspect", "super", "@"],
    &["inspect", "super", "--json", "@"],
    &["inspect", "chunks", "@"],
    &["inspect", "block-groups", "--json", "@"],
    &["inspect", "extent", "@", "#"],
    &["inspect", "extent", "--json", "@", "#"],
    &["inspect", "files-at", "--whole", "@", "#"],
    &["inspect", "files-at", "--physical", "--json", "@", "#"],
    &["inspect", "inode", "--subvolid", "5", "--number", "#", "@"],
    &["inspect", "inode", "--subvolid", "5", "--number", "#", "--json", "@"],
    &["map", "@", "-o", "-", "--cells", "256"],
    &["check", "--data", "--json", "@"],
    &["check", "@"],
    &["restore", "--list", "--json", "@"],
];

/// Prints what the input makes of a seed, by some of the commands.
///
/// # Errors
/// The file for the image cannot be made, which is not the image's fault.
///
/// # Panics
/// If a command breaks a limit.
pub fn printers(input: &[u8], run: Run<'_>) -> io::Result<()> {
    let mutated = mutate::mutate(input);
    // The rest of what the script says: which commands, and what they are asked about.
    let choices = [mutated.script, input.len() as u8, input.last().copied().unwrap_or(0)];
    print_some(&mutated.image, super::seeds::seed(mutated.seed), choices, run)
}

/// Prints an image that was made from a seed, by three of the commands.
///
/// # Errors
/// As [`printers`].
///
/// # Panics
/// If a command breaks a limit.
pub fn print_some(
    image: &Image,
    survey: &Survey,
    choices: [u8; 3],
    run: Run<'_>,
) -> io::Result<()> {
    let fd = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC)?;
    let file = File::from(fd);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    image.write_sparse(path.as_ref())?;
    let [first, a, b] = choices.map(usize::from);
    let address = match b % 3 {
        0 if !survey.extents.is_empty() => survey.extents[a % survey.extents.len()].at.0,
        1 => 256 + a as u64 % 80,
        _ => survey.blocks[a % survey.blocks.len()].at.0,
    };
    for turn in 0..3 {
        let line = LINES[(first + turn * 7) % LINES.len()];
        let words = line.iter().map(|word| match *word {
            "@" => path.clone(),
            "#" => address.to_string(),
            other => other.to_owned(),
        });
        let argv: Vec<OsString> =
            std::iter::once("larder".to_owned()).chain(words).map(OsString::from).collect();
        if let Err(text) = limits::timed("printing", || run(argv)) {
            assert!(!text.contains("Usage:"), "a command line that is not understood: {text}");
        }
    }
    Ok(())
}
