//! `btrfs inspect-internal dump-tree`: which trees and blocks of an image are shown, and in which
//! order. What a block says is `dump_items`'.
//!
//! The image is read as it lies there, without the engine, also while it is mounted. A block that
//! cannot be read is named, the rest is shown, and the exit code is 1.

use super::dump_items::{Look, key_text};
use super::{Done, Failed};
use crate::image::{Access, as_devices, open_devices};
use crate::print;
use crate::raw::{Problems, with_reader};
use larder_format::items::RootItem;
use larder_format::node::NodeView;
use larder_format::{Key, KeyType, Logical, ObjectId, TreeId};
use larder_restore::Reader;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Debug, clap::Args)]
#[allow(clippy::struct_excessive_bools)]
pub(crate) struct Options {
    /// Only the trees of extents and devices
    #[arg(short = 'e', long)]
    extents: bool,
    /// Only the trees of roots, chunks and devices
    #[arg(short = 'd', long)]
    device: bool,
    /// Only where the roots are
    #[arg(short = 'r', long)]
    roots: bool,
    /// As --roots, and the roots of older commits
    #[arg(short = 'R', long)]
    backups: bool,
    /// Only the tree of UUIDs
    #[arg(short = 'u', long)]
    uuid: bool,
    /// Only this block
    #[arg(short = 'b', long = "block", value_name = "ADDRESS")]
    blocks: Vec<u64>,
    /// Only this tree
    #[arg(short = 't', long, value_name = "TREE", allow_hyphen_values = true)]
    tree: Option<String>,
    /// With -b: also what is below the block
    #[arg(long)]
    follow: bool,
    /// Accepted: there is one device
    #[arg(long)]
    noscan: bool,
    /// Level by level, which is the default
    #[arg(long, overrides_with = "dfs")]
    bfs: bool,
    /// Each block before its neighbour
    #[arg(long, overrides_with = "bfs")]
    dfs: bool,
    /// Show no names
    #[arg(long)]
    hide_names: bool,
    /// Show the checksums of blocks
    #[arg(long)]
    csum_headers: bool,
    /// Show the checksums of data
    #[arg(long)]
    csum_items: bool,
    #[arg(required = true, value_name = "IMAGE")]
    pub(super) devices: Vec<PathBuf>,
}

/// Names of trees for `-t`, with and without what stands before `_TREE`.
const NAMES: [(&str, TreeId); 13] = [
    ("ROOT", ObjectId::ROOT_TREE),
    ("EXTENT", ObjectId::EXTENT_TREE),
    ("CHUNK", ObjectId::CHUNK_TREE),
    ("DEVICE", ObjectId::DEV_TREE),
    ("DEV", ObjectId::DEV_TREE),
    ("FS", ObjectId::FS_TREE),
    ("CSUM", ObjectId::CSUM_TREE),
    ("CHECKSUM", ObjectId::CSUM_TREE),
    ("QUOTA", ObjectId::QUOTA_TREE),
    ("UUID", ObjectId::UUID_TREE),
    ("FREE_SPACE", ObjectId::FREE_SPACE_TREE),
    ("BLOCK_GROUP", ObjectId::BLOCK_GROUP_TREE),
    ("DATA_RELOC", ObjectId::DATA_RELOC_TREE),
];

fn tree_id(text: &str) -> Result<TreeId, Failed> {
    if let Ok(id) = text.parse::<i128>()
        && let Ok(id) = u64::try_from(id).or_else(|_| i64::try_from(id).map(i64::cast_unsigned))
    {
        return Ok(ObjectId(id));
    }
    let name = text.to_ascii_uppercase().replace('-', "_");
    let name = name.strip_suffix("_TREE").unwrap_or(&name);
    let found = NAMES.iter().find(|(known, _)| *known == name);
    found.map(|(_, id)| *id).ok_or_else(|| Failed::because(format!("unrecognized tree id: {text}")))
}

/// A tree, and what stands above it.
struct Root {
    id: TreeId,
    title: String,
    at: Logical,
    level: u8,
    /// A tree lists it, not the superblock.
    is_listed: bool,
}

/// Shows an image.
pub(super) fn dump(path: &std::path::Path, options: &Options) -> Done {
    let tree = options.tree.as_deref().map(tree_id).transpose()?;
    path.metadata().map_err(|e| {
        let (shown, why) = (print::path(path), super::reason(&e));
        Failed::because(format!("invalid argument {shown}: {why}"))
    })?;
    let devices = open_devices(path, Access::Read { force: true })?;
    print::line("btrfs-progs v6.14")?;
    with_reader(as_devices(&devices), |reader, problems| {
        let dump = Dump { reader, problems, look: look(reader, options), options };
        dump.all(tree)
    })?;
    Ok(())
}

fn look(reader: &Reader<'_>, options: &Options) -> Look {
    let sb = reader.superblock();
    Look {
        csum: sb.csum_type(),
        csum_headers: options.csum_headers,
        csum_items: options.csum_items,
        hide_names: options.hide_names,
        sectorsize: sb.sectorsize.get(),
        nodesize: sb.nodesize.get(),
    }
}

struct Dump<'a> {
    reader: &'a Reader<'a>,
    problems: &'a Problems,
    look: Look,
    options: &'a Options,
}

impl Dump<'_> {
    fn all(&self, tree: Option<TreeId>) -> anyhow::Result<()> {
        let o = self.options;
        if !o.blocks.is_empty() {
            return o.blocks.iter().try_for_each(|at| self.tree(Logical(*at), o.follow));
        }
        let short = o.roots || o.backups;
        for root in self.fixed().into_iter().chain(self.listed()) {
            let wanted = match tree {
                Some(tree) => root.id == tree,
                None if o.extents => {
                    matches!(root.id, ObjectId::EXTENT_TREE | ObjectId::DEV_TREE)
                }
                None if o.device => !root.is_listed || root.id == ObjectId::DEV_TREE,
                None if o.uuid => root.id == ObjectId::UUID_TREE,
                None => true,
            };
            if wanted && short {
                let Root { title, at, level, .. } = &root;
                let colon = if title.ends_with(' ') { "" } else { ": " };
                print::line(&format!("{title}{colon}{at} level {level}"))?;
            } else if wanted {
                // Nothing stands behind the title there.
                print::line(if o.extents { root.title.trim_end() } else { &root.title })?;
                self.tree(root.at, true)?;
            }
        }
        let fixed = matches!(tree, Some(ObjectId::ROOT_TREE | ObjectId::CHUNK_TREE));
        if fixed || tree.is_none() && (o.extents || o.device || o.uuid) {
            return Ok(());
        }
        if o.backups {
            self.backups()?;
        }
        self.totals()
    }

    /// The trees to which the superblock points.
    fn fixed(&self) -> Vec<Root> {
        let sb = self.reader.superblock();
        let fixed = |id, title: &str, at, level| {
            let title = title.to_owned();
            Root { id, title, at, level, is_listed: false }
        };
        let mut all = vec![
            fixed(ObjectId::ROOT_TREE, "root tree", sb.root(), sb.root_level),
            fixed(ObjectId::CHUNK_TREE, "chunk tree", sb.chunk_root(), sb.chunk_root_level),
        ];
        if let Some(at) = sb.log_root() {
            all.push(fixed(ObjectId::TREE_LOG, "log root tree", at, sb.log_root_level));
        }
        all
    }

    /// The trees that the root tree lists, and then those of the log's.
    fn listed(&self) -> Vec<Root> {
        let sb = self.reader.superblock();
        let mut all = self.roots_in(sb.root());
        if let Some(at) = sb.log_root() {
            all.extend(self.roots_in(at));
        }
        all
    }

    fn roots_in(&self, at: Logical) -> Vec<Root> {
        let mut all = Vec::new();
        // What cannot be read is said when the tree itself is shown.
        let _ = self.blocks(at, true, &mut |view| {
            let items = if view.level() == 0 { view.items() } else { &[] };
            for (slot, item) in items.iter().enumerate() {
                let key = Key::from(item.key);
                if key.kind != KeyType::ROOT_ITEM {
                    continue;
                }
                if let Some(Ok(root)) = view.data(slot).map(RootItem::parse) {
                    let title = format!("{} key {} ", kind_of(key.objectid), key_text(key));
                    let (id, at, level) = (key.objectid, root.root(), root.level);
                    all.push(Root { id, title, at, level, is_listed: true });
                }
            }
            Ok(())
        });
        all
    }

    fn tree(&self, at: Logical, below: bool) -> anyhow::Result<()> {
        self.blocks(at, below, &mut |view| {
            // Of extents, only what is known of them.
            if self.options.extents && view.level() > 0 {
                return Ok(());
            }
            print::line(self.look.block(view).trim_end_matches('\n'))
        })
    }

    /// Calls `each` for a block, and for all below it if `below`.
    fn blocks(
        &self,
        at: Logical,
        below: bool,
        each: &mut dyn FnMut(NodeView<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        // A damaged tree may lead back to a block that was shown.
        let mut seen = HashSet::from([at]);
        let mut next = vec![at];
        while !next.is_empty() {
            let mut children = Vec::new();
            for (n, at) in next.iter().enumerate() {
                let Some(block) = self.read(*at) else { continue };
                let view = NodeView(&block);
                each(view)?;
                let pointers = if below && view.level() > 0 { view.pointers() } else { &[] };
                let all = pointers.iter().map(|pointer| Logical(pointer.blockptr.get()));
                children.extend(all.filter(|at| seen.insert(*at)));
                if self.options.dfs {
                    children.extend_from_slice(&next[n + 1..]);
                    break;
                }
            }
            next = children;
        }
        Ok(())
    }

    fn read(&self, at: Logical) -> Option<Arc<[u8]>> {
        let block = self.reader.block(at);
        block
            .inspect_err(|e| self.problems.add(format!("failed to read tree block {at}: {e}")))
            .ok()
    }

    fn totals(&self) -> anyhow::Result<()> {
        let sb = self.reader.superblock();
        print::line(&format!("total bytes {}", sb.total_bytes.get()))?;
        print::line(&format!("bytes used {}", sb.bytes_used.get()))?;
        print::line(&format!("uuid {}", print::uuid(sb.fsid)))
    }

    fn backups(&self) -> anyhow::Result<()> {
        for (slot, b) in self.reader.superblock().backup_roots.iter().enumerate() {
            print::line(&format!("btrfs root backup slot {slot}"))?;
            for (name, generation, at) in [
                ("\ttree root", b.tree_root_gen, b.tree_root),
                ("\t\textent root", b.extent_root_gen, b.extent_root),
                ("\t\tchunk root", b.chunk_root_gen, b.chunk_root),
                ("\t\tdevice root", b.dev_root_gen, b.dev_root),
                ("\t\tcsum root", b.csum_root_gen, b.csum_root),
                ("\t\tfs root", b.fs_root_gen, b.fs_root),
            ] {
                print::line(&format!("{name} gen {generation} block {at}"))?;
            }
            let (used, total, devices) = (b.bytes_used, b.total_bytes, b.num_devices);
            print::line(&format!("\t\t{used} used {total} total {devices} devices"))?;
        }
        Ok(())
    }
}

/// What a tree is called above its dump.
fn kind_of(id: TreeId) -> &'static str {
    match id {
        ObjectId::ROOT_TREE => "root tree",
        ObjectId::EXTENT_TREE => "extent tree",
        ObjectId::CHUNK_TREE => "chunk tree",
        ObjectId::DEV_TREE => "device tree",
        ObjectId::FS_TREE => "fs tree",
        ObjectId::ROOT_TREE_DIR => "directory tree",
        ObjectId::CSUM_TREE => "checksum tree",
        ObjectId::QUOTA_TREE => "quota tree",
        ObjectId::UUID_TREE => "uuid tree",
        ObjectId::FREE_SPACE_TREE => "free space tree",
        ObjectId::BLOCK_GROUP_TREE => "block group tree",
        ObjectId::TREE_LOG => "log tree",
        ObjectId::TREE_RELOC => "reloc tree",
        ObjectId::DATA_RELOC_TREE => "data reloc tree",
        _ => "file tree",
    }
}
