//! What a simulated disk holds: a sparse map of pages that costs next to nothing to copy.
//!
//! The decision hidden here is how thousands of almost equal disks are kept. A crash simulation
//! makes one disk per crash state, and they differ in a handful of pages. So pages are immutable
//! and shared by reference count, an image is a frozen map plus a small overlay, and copying an
//! image copies the overlay only. A page that is absent reads as zeros; a page of zeros counts as
//! absent when images are compared.
//!
//! Several disks are one image, too: a **stack**, in which the bytes of disk `n` begin at `n` times
//! [`STRIDE`]. So what happens to them together stays one value, with one hash.
//!
//! Each page remembers a hash of its content once it was asked for, so that the hash of a
//! whole image is a sum over its pages, and that of a crash state costs the pages that it changed.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// From the first byte of a disk in a stack to that of the next one. Longer than any disk.
pub const STRIDE: u64 = 1 << 44;

/// An immutable page with a hash that is computed when first asked for.
pub struct Page {
    bytes: [u8; PAGE],
    hash: OnceLock<u64>,
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Page({:016x})", self.hash())
    }
}

impl Page {
    /// A page that holds these bytes.
    #[must_use]
    pub fn new(bytes: [u8; PAGE]) -> Arc<Self> {
        Arc::new(Self { bytes, hash: OnceLock::new() })
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8; PAGE] {
        &self.bytes
    }

    /// Hash of the content; 0 for a page of zeros, and for nothing else.
    #[must_use]
    pub fn hash(&self) -> u64 {
        *self.hash.get_or_init(|| {
            if self.bytes.iter().all(|b| *b == 0) {
                0
            } else {
                xxhash_rust::xxh64::xxh64(&self.bytes, 0x6c61_7264_6572).max(1)
            }
        })
    }
}

/// The part of an image's hash that page `number` stands for.
fn contribution(number: u64, page: &Page) -> u64 {
    let hash = page.hash();
    if hash == 0 {
        return 0;
    }
    // Two rounds of splitmix, so that sums of related pages do not cancel out.
    let mut x = hash ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..2 {
        x ^= x >> 30;
        x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 27;
        x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
    }
    x
}

type Pages = HashMap<u64, Arc<Page>>;

/// The bytes of a disk. `Clone` is cheap.
#[derive(Clone, Debug)]
pub struct Image {
    /// Bytes of each disk; 0 for one that is not there any more.
    sizes: Vec<u64>,
    base: Arc<Pages>,
    over: Pages,
    /// Sum of the contributions of all pages, overlay applied; `None` until it was asked for.
    hash: Option<u64>,
}

impl Image {
    /// A disk of `size` bytes, all zero.
    #[must_use]
    pub fn zeroed(size: u64) -> Self {
        Self::stack(vec![size])
    }

    /// Disks of these sizes, all zero.
    #[must_use]
    pub fn stack(sizes: Vec<u64>) -> Self {
        Self { sizes, base: Arc::default(), over: Pages::new(), hash: Some(0) }
    }

    /// Bytes of each disk; 0 for one that is lost.
    #[must_use]
    pub fn sizes(&self) -> &[u64] {
        &self.sizes
    }

    /// The disk of this number by itself.
    #[must_use]
    pub fn disk(&self, number: usize) -> Self {
        let first = number as u64 * STRIDE / PAGE as u64;
        let mut disk = Self::zeroed(self.sizes[number]);
        for (n, page) in self.pages_of(number) {
            disk.set_page(n - first, page);
        }
        disk
    }

    /// Puts the first disk of another image on top of the stack.
    pub(crate) fn push(&mut self, disk: &Self) {
        let first = self.sizes.len() as u64 * STRIDE / PAGE as u64;
        self.sizes.push(disk.sizes[0]);
        for (n, page) in disk.pages_of(0) {
            self.set_page(first + n, page);
        }
    }

    /// Takes a disk out of the stack. The others keep their numbers.
    pub fn lose(&mut self, number: usize) {
        for (n, _) in self.pages_of(number) {
            self.set_page(n, Page::new([0; PAGE]));
        }
        self.sizes[number] = 0;
    }

    /// Gives a disk the size and the content that it has in another stack.
    pub fn take_disk(&mut self, number: usize, from: &Self) {
        for (n, _) in self.pages_of(number) {
            if from.page(n).is_none() {
                self.set_page(n, Page::new([0; PAGE]));
            }
        }
        for (n, page) in from.pages_of(number) {
            self.set_page(n, page);
        }
        self.sizes[number] = from.sizes[number];
    }

    /// The pages of a disk that were ever written, by their number in the stack.
    pub(crate) fn pages_of(&self, number: usize) -> Vec<(u64, Arc<Page>)> {
        let first = number as u64 * STRIDE / PAGE as u64;
        let numbers = first..first + STRIDE / PAGE as u64;
        let all = self.base.iter().filter(|(n, _)| !self.over.contains_key(n)).chain(&self.over);
        let mut pages: Vec<(u64, Arc<Page>)> =
            all.filter(|(n, _)| numbers.contains(n)).map(|(n, page)| (*n, page.clone())).collect();
        pages.sort_unstable_by_key(|(n, _)| *n);
        pages
    }

    /// The content of an image file; holes are not read.
    ///
    /// # Errors
    /// What reading the file says.
    pub fn from_file(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut pages = Pages::new();
        let mut at = 0;
        while at < size {
            let Some(data) = next_data(&file, at)? else { break };
            at = data - data % PAGE as u64;
            file.seek(SeekFrom::Start(at))?;
            // One stretch at a time: a page of data, then ask again, costs a call per page but is
            // simple.
            let mut bytes = [0; PAGE];
            let len = usize::try_from(size - at).unwrap_or(PAGE).min(PAGE);
            file.read_exact(&mut bytes[..len])?;
            if bytes.iter().any(|b| *b != 0) {
                pages.insert(at / PAGE as u64, Page::new(bytes));
            }
            at += PAGE as u64;
        }
        Ok(Self { sizes: vec![size], base: Arc::new(pages), over: Pages::new(), hash: None })
    }

    /// Size of the first disk, in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.sizes[0]
    }

    /// The page with this number, if it was ever written.
    #[must_use]
    pub fn page(&self, number: u64) -> Option<&Arc<Page>> {
        self.over.get(&number).or_else(|| self.base.get(&number))
    }

    /// Replaces a page.
    pub(crate) fn set_page(&mut self, number: u64, page: Arc<Page>) {
        if let Some(sum) = self.hash {
            let old = self.page(number).map_or(0, |p| contribution(number, p));
            self.hash = Some(sum.wrapping_sub(old).wrapping_add(contribution(number, &page)));
        }
        self.over.insert(number, page);
    }

    /// Fills `buf` from `at`; beyond what was written there are zeros. The caller has checked the
    /// bounds.
    pub fn read(&self, at: u64, buf: &mut [u8]) {
        let mut done = 0;
        while done < buf.len() {
            let pos = at + done as u64;
            let start = (pos % PAGE as u64) as usize;
            let len = (PAGE - start).min(buf.len() - done);
            let out = &mut buf[done..done + len];
            match self.page(pos / PAGE as u64) {
                Some(page) => out.copy_from_slice(&page.bytes[start..start + len]),
                None => out.fill(0),
            }
            done += len;
        }
    }

    /// Writes `data` at `at`. The caller has checked the bounds.
    pub fn write(&mut self, at: u64, data: &[u8]) {
        for piece in pieces(at, data) {
            self.put(&piece);
        }
    }

    /// Writes one piece.
    pub fn put(&mut self, piece: &Piece) {
        if piece.start == 0 && piece.end == PAGE {
            self.set_page(piece.page, piece.data.clone());
        } else {
            let mut bytes = self.page(piece.page).map_or([0; PAGE], |p| p.bytes);
            bytes[piece.start..piece.end]
                .copy_from_slice(&piece.data.bytes[piece.start..piece.end]);
            self.set_page(piece.page, Page::new(bytes));
        }
    }

    /// Merges the overlay into the frozen part: worth it before many copies are made.
    pub fn freeze(&mut self) {
        if self.over.is_empty() {
            return;
        }
        let over = std::mem::take(&mut self.over);
        Arc::make_mut(&mut self.base).extend(over);
    }

    /// [`Image::freeze`], if the overlay has grown so large that copying it costs more.
    pub(crate) fn freeze_if_large(&mut self) {
        if self.over.len() > 64 + self.base.len() / 16 {
            self.freeze();
        }
    }

    /// A hash of the whole content: equal for equal disks, whatever they came from.
    pub fn content_hash(&mut self) -> u64 {
        *self.hash.get_or_insert_with(|| {
            let base = self.base.iter().filter(|(n, _)| !self.over.contains_key(n));
            base.chain(self.over.iter())
                .fold(0u64, |sum, (n, p)| sum.wrapping_add(contribution(*n, p)))
        })
    }

    /// Writes a sparse file with the content of the first disk.
    ///
    /// # Errors
    /// What the file says.
    pub fn write_sparse(&self, path: &Path) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        let file = File::options().write(true).create(true).truncate(true).open(path)?;
        file.set_len(self.size())?;
        for (n, page) in self.pages_of(0) {
            if page.hash() != 0 {
                let at = n * PAGE as u64;
                let len = usize::try_from(self.size() - at).unwrap_or(PAGE).min(PAGE);
                file.write_all_at(&page.bytes[..len], at)?;
            }
        }
        (&file).flush()
    }
}

fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(data) => Ok(Some(data)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The part of a write that lies in one page.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Number of the page.
    pub page: u64,
    /// First byte within the page.
    pub start: usize,
    /// End within the page.
    pub end: usize,
    /// A page that holds the bytes at their place; what is outside `start..end` means nothing.
    pub data: Arc<Page>,
}

impl Piece {
    /// The part of the piece that lies in a range of the disk; `None` if there is none.
    #[must_use]
    pub(crate) fn clip(&self, range: Range<u64>) -> Option<Self> {
        let page = self.page * PAGE as u64;
        let start = (page + self.start as u64).max(range.start);
        let end = (page + self.end as u64).min(range.end);
        (start < end).then(|| Self {
            page: self.page,
            start: (start - page) as usize,
            end: (end - page) as usize,
            data: self.data.clone(),
        })
    }
}

/// Cuts a write into pages.
#[must_use]
pub fn pieces(at: u64, data: &[u8]) -> Vec<Piece> {
    let mut out = Vec::with_capacity(data.len() / PAGE + 2);
    let mut done = 0;
    while done < data.len() {
        let pos = at + done as u64;
        let start = (pos % PAGE as u64) as usize;
        let len = (PAGE - start).min(data.len() - done);
        let mut bytes = [0; PAGE];
        bytes[start..start + len].copy_from_slice(&data[done..done + len]);
        out.push(Piece {
            page: pos / PAGE as u64,
            start,
            end: start + len,
            data: Page::new(bytes),
        });
        done += len;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_was_written_at_odd_places_and_zeros_elsewhere() {
        let mut image = Image::zeroed(1 << 20);
        image.write(4000, &[7; 5000]);
        let mut buf = [1; 6000];
        image.read(3500, &mut buf);
        assert!(buf[..500].iter().all(|b| *b == 0));
        assert!(buf[500..5500].iter().all(|b| *b == 7));
        assert!(buf[5500..].iter().all(|b| *b == 0));
    }

    #[test]
    fn a_copy_does_not_see_later_writes() {
        let mut image = Image::zeroed(1 << 20);
        image.write(0, &[1; PAGE]);
        image.freeze();
        let copy = image.clone();
        image.write(10, &[2; 10]);
        image.freeze();
        let mut buf = [0; 20];
        copy.read(0, &mut buf);
        assert_eq!(buf, [1; 20]);
        image.read(0, &mut buf);
        assert_eq!(buf[10..], [2; 10]);
    }

    #[test]
    fn hash_depends_on_content_and_place_and_not_on_history() {
        let mut a = Image::zeroed(1 << 20);
        let mut b = Image::zeroed(1 << 20);
        a.write(0, &[1; 8192]);
        a.write(4096, &[2; 4096]);
        a.write(65536, &[0; 4096]);
        b.write(4096, &[2; 4096]);
        b.freeze();
        b.write(0, &[1; 4096]);
        assert_eq!(a.content_hash(), b.content_hash());
        let mut fresh = Image { hash: None, ..a.clone() };
        assert_eq!(fresh.content_hash(), a.content_hash(), "incremental equals full");
        let mut swapped = Image::zeroed(1 << 20);
        swapped.write(0, &[2; 4096]);
        swapped.write(4096, &[1; 4096]);
        assert_ne!(swapped.content_hash(), a.content_hash());
    }

    #[test]
    fn files_come_back_and_stay_sparse() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let mut image = Image::zeroed(64 << 20);
        image.write(1 << 20, b"hello");
        image.write((64 << 20) - 3, b"end");
        image.write_sparse(&path).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!(meta.len(), 64 << 20);
        assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
        let mut back = Image::from_file(&path).unwrap();
        assert_eq!(back.content_hash(), image.content_hash());
    }
}
