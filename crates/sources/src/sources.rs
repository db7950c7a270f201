//! All sources of an image together: gathered once, then streamed as often as one likes.
//!
//! [`Sources::gather`] reads every source to its end, except the contents of files. After that the
//! tree is known to be sound: links lead to files, no path leads out. [`Sources::entries`] streams
//! it, and [`Sources::first_layers`] streams the tree as it was before the later layers.
//! [`Sources::open`] gives the contents of a file.

use crate::error::{Error, Result, shown};
use crate::overlay::{Collector, Entries, Merged};
use crate::read::bytes::Bytes;
use crate::read::directory::{self, DirectoryStore};
use crate::read::image::{self, ImageStore};
use crate::read::manifest::{self, Language};
use crate::read::tar::{self, TarStore, Whiteouts};
use crate::read::{Store, oci, spool};
use crate::{Contents, Locator, Options, Sort, SourceNumber, SourceSpec, TreePath};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// What an image is to hold.
pub struct Sources {
    merged: Merged,
    stores: Vec<Box<dyn Store>>,
    notes: Vec<String>,
}

impl std::fmt::Debug for Sources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sources").field("merged", &self.merged).finish_non_exhaustive()
    }
}

impl Sources {
    /// Reads sources, the later ones over the earlier.
    ///
    /// # Errors
    /// A source cannot be read, or has something that no image can hold.
    pub fn gather(specs: &[SourceSpec], options: &Options) -> Result<Self> {
        let mut gathering = Gathering { collector: Collector::new(options), stores: Vec::new() };
        for spec in specs {
            gathering.add(spec)?;
        }
        let (merged, notes) = gathering.collector.finish()?;
        Ok(Self { merged, stores: gathering.stores, notes })
    }

    /// The whole tree, in the order of paths.
    ///
    /// # Errors
    /// A temporary file cannot be read or written.
    pub fn entries(&self) -> Result<Entries> {
        self.merged.entries(self.merged.layers().len())
    }

    /// The names of the layers, from the lowest. Layers of container images count one by one, and
    /// any other source is one.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = &str> {
        self.merged.layers()
    }

    /// The tree of the first `layers` layers. Its groups of links have the same numbers in each
    /// tree.
    ///
    /// # Errors
    /// As for [`entries`](Self::entries).
    pub fn first_layers(&self, layers: usize) -> Result<Entries> {
        self.merged.entries(layers)
    }

    /// An upper bound of the number of entries, for progress.
    #[must_use]
    pub fn at_most(&self) -> u64 {
        self.merged.at_most()
    }

    /// What sources have and no image can have. It was left out.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The name of the source that has what is at a path, as an error about it should say. Finding
    /// it takes as long as streaming all entries.
    #[must_use]
    pub fn source_of(&self, path: &TreePath) -> Option<&str> {
        self.merged.source_of(path)
    }

    /// Opens the contents of a file. Any number of threads may do so at the same time.
    ///
    /// # Errors
    /// The file cannot be opened, or is another one than before. The text names it.
    pub fn open(&self, locator: &Locator) -> io::Result<Box<dyn Contents>> {
        self.stores[locator.source.0 as usize].open(&locator.key)
    }
}

struct Gathering {
    collector: Collector,
    stores: Vec<Box<dyn Store>>,
}

impl Gathering {
    fn add(&mut self, spec: &SourceSpec) -> Result<()> {
        match &spec.sort {
            Sort::Detect(path) => self.detect(spec, path),
            Sort::Directory(path) => self.directory(spec, path),
            Sort::Tar(path) => {
                let bytes = Bytes::open(path, &name(path))?;
                self.tar(spec, bytes)
            }
            Sort::StandardInput => {
                let bytes = spool::standard_input(self.collector.options())?;
                self.tar(spec, bytes)
            }
            Sort::Image { file, subvolume } => self.image(spec, file, subvolume.as_deref()),
            Sort::Oci { layout, reference } => {
                let layers = oci::open_layout(layout, reference, self.collector.options())?;
                self.layers(spec, layers)
            }
            Sort::OciArchive { file, reference } => {
                let bytes = Bytes::open(file, &name(file))?;
                let options = self.collector.options();
                let layers = oci::open_layout_archive(bytes, reference, options)?;
                self.layers(spec, layers)
            }
            Sort::DockerArchive { file, reference } => {
                let bytes = Bytes::open(file, &name(file))?;
                let options = self.collector.options();
                let layers = oci::open_docker_archive(bytes, reference, options)?;
                self.layers(spec, layers)
            }
            Sort::Mtree(file) => self.manifest(spec, file, Language::Mtree),
            Sort::Manifest(file) => self.manifest(spec, file, Language::Own),
        }
    }

    /// Looks at a file to see what it is.
    fn detect(&mut self, spec: &SourceSpec, path: &Path) -> Result<()> {
        let name = name(path);
        let meta = std::fs::metadata(path).map_err(Error::io(&name))?;
        if meta.is_dir() {
            return self.directory(spec, path);
        }
        let file = File::open(path).map_err(Error::io(&name))?;
        if !meta.is_file() {
            if image::is_image(&start_of(&file).map_err(Error::io(&name))?) {
                return self.image(spec, path, None);
            }
            // A pipe, as `<(command)` gives it.
            let bytes = spool::spool(file, &name, self.collector.options())?;
            return self.tar(spec, bytes);
        }
        let bytes = Bytes::of_file(file, &name)?;
        if image::is_image(&spool::first_bytes(&bytes, image::ENOUGH)?) {
            return self.image(spec, path, None);
        }
        self.tar(spec, bytes)
    }

    /// The number of the store that comes next.
    fn next_store(&self) -> SourceNumber {
        SourceNumber(u32::try_from(self.stores.len()).expect("fewer sources than that"))
    }

    fn directory(&mut self, spec: &SourceSpec, path: &Path) -> Result<()> {
        let number = self.next_store();
        self.stores.push(Box::new(DirectoryStore::new(path, false)?));
        self.collector.begin_layer(&spec.to_string(), &spec.place, false);
        directory::read(&mut self.collector, path, number)
    }

    fn tar(&mut self, spec: &SourceSpec, bytes: Bytes) -> Result<()> {
        let bytes = spool::unpacked(bytes, self.collector.options())?;
        let number = self.next_store();
        self.collector.begin_layer(&spec.to_string(), &spec.place, false);
        tar::read(&mut self.collector, &bytes, number, Whiteouts::Names)?;
        self.stores.push(Box::new(TarStore(bytes)));
        Ok(())
    }

    fn image(&mut self, spec: &SourceSpec, file: &Path, subvolume: Option<&[u8]>) -> Result<()> {
        let store = ImageStore::open(file, subvolume)?;
        let number = self.next_store();
        self.collector.begin_layer(&spec.to_string(), &spec.place, false);
        image::read(&mut self.collector, &store, number)?;
        self.stores.push(Box::new(store));
        Ok(())
    }

    fn layers(&mut self, spec: &SourceSpec, layers: oci::Layers) -> Result<()> {
        let first = self.next_store().0;
        let number = |store: usize| SourceNumber(first + u32::try_from(store).unwrap_or(u32::MAX));
        layers.read(&mut self.collector, &spec.place, number)?;
        let stores = layers.stores.into_iter();
        self.stores.extend(stores.map(|store| Box::new(store) as Box<dyn Store>));
        Ok(())
    }

    fn manifest(&mut self, spec: &SourceSpec, file: &Path, language: Language) -> Result<()> {
        let name = name(file);
        let bytes = Bytes::open(file, &name)?;
        let bytes = spool::unpacked(bytes, self.collector.options())?;
        let base = file.parent().filter(|base| !base.as_os_str().is_empty());
        let base = base.unwrap_or(Path::new("."));
        let number = self.next_store();
        self.stores.push(Box::new(DirectoryStore::new(base, true)?));
        self.collector.begin_layer(&spec.to_string(), &spec.place, true);
        manifest::read(&mut self.collector, &bytes, language, base, number)
    }
}

/// A path as messages show it.
fn name(path: &Path) -> String {
    shown(path.as_os_str().as_bytes())
}

/// The first bytes of a block device. Other special files have none that can be read twice.
fn start_of(file: &File) -> io::Result<Vec<u8>> {
    use std::os::unix::fs::{FileExt, FileTypeExt};
    if !file.metadata()?.file_type().is_block_device() {
        return Ok(Vec::new());
    }
    let mut start = vec![0; image::ENOUGH];
    match file.read_exact_at(&mut start, 0) {
        Ok(()) => Ok(start),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}
