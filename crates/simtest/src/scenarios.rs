//! Sequences that have broken the durability of some file system, by name.
//!
//! They are those of `docs/LOG.md` that need nothing but the operations of [`crate::ops`]: what
//! must and may be there afterwards follows from the model, at the end as at every earlier cut. A
//! few that need many names or steps are made by code.

use crate::workload::Workload;

/// Name and text of the scenarios that fit into a line.
pub(crate) const LINES: &[(&str, &str)] = &[
    ("L-N01", "new f; f[0,12K)=a; F f"),
    ("L-N01-byte", "new f; f[0,1)=a; F f"),
    ("L-N01-inline", "new f; f[0,2K)=a; F f"),
    ("L-N01-block", "new f; f[0,4K)=a; F f"),
    ("L-N01-large", "new f; f[0,5M)=a; F f"),
    ("L-N01-sparse", "new f; f[1G,1073745920)=a; F f"),
    ("L-N02", "mk A; F A"),
    ("L-N02-deep", "mk A; mk A/B; mk A/B/C; F A/B/C"),
    ("L-N03", "mk A; mk A/B; mk A/B/C; new A/B/C/f; new A/x; new A/B/y; F A/B/C/f"),
    ("L-N04", "mk A; new A/f; COMMIT; new A/g; F A; F A/g; rm A/f; rm A/g; rmdir A"),
    ("L-N05", "new f; F f; ✂ replay; new g; F g"),
    ("L-N06", "mk T; mk T/A; new T/f; new T/A/f; F T/A/f; F T"),
    // An ancestor's attributes that are not in the tree yet, beside others that are.
    ("N-mode-of-ancestor", "mk A; mode A 441; xa A user.1=v; new A/x; F A/x"),
    (
        "N-mode-of-ancestor-committed",
        "mk A; COMMIT; mk B; mv A B/A; mode B 441; xa B user.1=v; F B/A",
    ),
    // The same of inodes that the last commit or an earlier fsync has, of which only the names are
    // logged by now.
    ("N-attributes-of-ancestor", "mk B; COMMIT; mode B 564; xa B user.1=v; mv B g; new g/f; F g/f"),
    (
        "N-attributes-of-ancestor-synced",
        "mk B; F B; mode B 564; xa B user.1=v; mv B g; new g/f; F g/f",
    ),
    (
        "N-attributes-of-ancestor-removed",
        "mk B; xa B user.1=v; COMMIT; mode B 564; xa- B user.1; mv B g; new g/f; F g/f",
    ),
    (
        "N-attributes-of-ancestor-later",
        "mk B; COMMIT; mode B 564; xa B user.1=v; mv B g; new g/f; F g/f; F g; F g/f",
    ),
    (
        "N-attributes-of-another",
        "new f; new g; COMMIT; mode f 600; xa f user.1=v; mv f h; mv g f; F f",
    ),
    ("N-attributes-of-root", "new f; COMMIT; mode / 711; xa / user.1=v; mv f g; F g; F /"),
    // A name that is gone is logged with its directory: the inode is counted again, and is else as
    // it was.
    ("N-attributes-of-loser", "mk B; new x; ln x B/h; COMMIT; mode x 127; rm B/h; F B"),
    // A name that it had, lost and has again: elsewhere in the directory.
    ("N-name-again", "mk A; new A/f; A/f[0,8K)=i; COMMIT; mv A/f A/g; mv A/g A/f; F A/f"),
    ("N-name-again-linked", "mk A; new A/f; A/f[0,8K)=i; COMMIT; mv A/f A/g; ln A/g A/f; F A/g"),
    ("N-name-again-by-itself", "mk A; new A/f; A/f[0,8K)=i; COMMIT; mv A/f A/g; ln A/g A/f; F A/f"),
    ("N-name-again-elsewhere", "mk B; new g; COMMIT; mv g B/g; ln B/g g; F B/g"),
    ("N-name-again-removed", "mk A; new A/f; COMMIT; ln A/f g; rm A/f; ln g A/f; F g"),
    // The directory is newer than the file: its deletions are replayed after the file's attributes.
    ("N-name-gone-from-newer", "new f; mk B; ln f B/g; COMMIT; rm B/g; F f"),
    ("N-name-moved-from-newer", "new f; mk B; mv f B/g; COMMIT; B/g[0,8K)=i; mv B/g g; F g"),
    ("N-name-moved-within-newer", "new f; mk B; mv f B/g; COMMIT; mv B/g B/f; F B/f"),
    ("N-name-gone-both-logged", "new f; new g; mk B; ln f B/g; COMMIT; rm B/g; ln g B/g; F g; F f"),
    // A name that only the log has, and that went to a whiteout in the moment in which it was lost.
    ("N-logged-name-whiteout", "new f; F f; mv! f g; F g"),
    ("N-logged-name-whiteout-gone", "mk A; new A/g; F A/g; mv! A/g h; rm h; new A/x; F A/x"),
    ("N-logged-name-exchanged", "new f; F f; mk A; new A/g; mv= f A/g; F A/g; rm A/g; F f"),
    // Old names of what was fsynced that others have by now, known to the last commit or not.
    ("N-old-name-taken", "new f; mv f g; new f; F g"),
    ("N-old-name-taken-and-gone", "new f; COMMIT; mv f x; new f; F f; rm f; mv x g; F g"),
    ("N-old-name-taken-and-left", "new f; COMMIT; mv f x; new f; F f; mv f h; mv x g; F g"),
    (
        "N-old-name-taken-and-gone-dir",
        "mk A; new A/f; COMMIT; mv A/f x; new A/f; F A/f; rm A/f; mv x g; F g; F A",
    ),
    ("N-old-name-taken-dir", "mk A; COMMIT; mk X; mv X A; mv A B; mk A; F B"),
    ("L-R01", "new f; f[0,1M)=a; F f; mv f g; F g"),
    ("L-R02", "new f; f[0,1M)=a; F f; f[2M,3M)=b; wb f[2M,3M); mv f g; F g"),
    ("L-R03", "new f; mk A; F f; mv f A/f; F A; F A/f; rm A/f; rmdir A"),
    ("L-R03-xattr", "new f; mk A; F f; mv f A/f; F A; xa A/f user.u=v; F A/f"),
    ("L-R04", "mk A; mk A/B; mk C; new A/B/f; COMMIT; mv A/B/f C/f; new A/g; F A; F C/f"),
    ("L-R05", "mk A; mk B; mk C; new A/f; ln A/f B/l; new B/g; COMMIT; rm B/l; mv B/g C/g; F A/f"),
    (
        "L-R06",
        "mk A; mk A/X; new A/X/f; A/X/f[0,9000)=f; new A/X/g; A/X/g[0,300)=g; COMMIT; mv A/X A/Y; \
            mk A/X; F A/X",
    ),
    (
        "L-R07",
        "mk X; mk Y; new X/f; mk Y/Z; new Y/g; COMMIT; ln X/f X/l; mv Y/Z X/Z; mv Y/g X/g; F X/l",
    ),
    ("L-R08", "mk A; COMMIT; mv A B; new B/f; F B/f; F B"),
    ("L-R09", "mk A; mk B; new B/f; COMMIT; mv B/f A/f; mv A B; F B/f"),
    ("L-R09-new", "mk A; mk A/C; mk B; new B/f; F B/f; mv B/f A/C/f; mv A/C B; F B/f"),
    ("L-R10", "mk A; new A/f; F A/f; mk B; new B/f; mv B/f A/f; new A/g; F A/g; F A"),
    ("L-R11", "new f; f[0,9000)=o; COMMIT; new t; t[0,12000)=n; F t; mv t f"),
    ("L-R11-synced", "new f; f[0,9000)=o; COMMIT; new t; t[0,12000)=n; F t; mv t f; F f"),
    ("L-R12", "new f; f[0,5000)=a; F f; mv f g; F g; mv g h; F h; mv h f; F f"),
    (
        "L-R12-commits",
        "new f; f[0,5000)=a; F f; mv f g; COMMIT; F g; mv g h; F h; COMMIT; mv h f; F f",
    ),
    ("L-R13", "mk D; new D/f; F D/f; mv D E; F E/f"),
    ("L-R13-deep", "mk D; mk D/a; mk D/a/b; new D/a/b/f; F D/a/b/f; mv D E; F E/a/b/f"),
    ("L-R14", "new f; f[0,8000)=a; F f; trunc f 3000; mv f g; F g"),
    (
        "L-R15",
        "new f; f[0,8K)=a; F f; mk A; new A/x; mk B; COMMIT; f[8K,16K)=b; mv A/x B/x; F A; F f",
    ),
    ("L-R16", "new f; COMMIT; mk D; f[0,64K)=a; F f; ln f D/l; F /"),
    ("L-R17", "new f; COMMIT; mv! f g; F g"),
    ("L-C01", "mk A; new A/f; A/f[0,16K)=o; COMMIT; mv A/f A/g; new A/f; A/f[0,16K)=n; F A/f"),
    ("L-C02", "mk A; new A/f; COMMIT; mv A/f A/g; new A/f; F A/g"),
    ("L-C03", "mk A; new A/f; ln A/f A/g; COMMIT; mv A/f A/h; mv A/g A/f; new A/g; F A/g"),
    (
        "L-C04",
        "mk A; new A/1; A/1+300=f; new A/2; A/2+500=h; COMMIT; mv A/1 A/3; mv A/2 A/4; ln A/3 \
         A/2; new A/1; A/1+100=b; F A/1",
    ),
    (
        "L-C05",
        "mk A; new A/1; A/1+300=f; new A/2; A/2+500=h; COMMIT; mv A/1 A/3; rm A/2; ln A/3 A/2; \
         new A/1; A/1+100=b; F A/1",
    ),
    ("L-C06", "mk A; new A/f; ln A/f A/g; COMMIT; rm A/g; new A/g; F A/g"),
    ("L-C07", "mk A; mk A/x; new A/x/k; COMMIT; rm A/x/k; rmdir A/x; new A/x; F A/x"),
    ("L-C07-back", "mk A; new A/x; COMMIT; rm A/x; mk A/x; new A/x/1; new A/x/2; F A/x/1"),
    (
        "L-C08",
        "new 1; 1+100=1; new 2; 2+200=2; new 3; 3+300=3; new 4; 4+400=4; new 5; 5+500=5; COMMIT; \
         mv 1 s; mv 2 1; mv 3 2; mv 4 3; mv 5 4; mv s 5; F 3",
    ),
    (
        "L-K01",
        "mk A; mk A/B; new A/B/f; A/B/f+5000=x; ln A/B/f A/B/g; COMMIT; rm A/B/g; F A/B/f; rm \
         A/B/f; rmdir A/B; rmdir A",
    ),
    ("L-K04", "new f; f[0,4K)=a; F f; ln f l; new g; F g"),
    ("L-K05", "new f; f[0,8K)=a; COMMIT; f+4K=b; F f; ln f l; new g; F g"),
    ("L-K06", "new f; f[0,32K)=a; F f; COMMIT; ln f l; COMMIT; f+32K=b; F f"),
    ("L-K07", "mk A; new A/f; new A/g; COMMIT; ln A/g A/gl; ln A/f A/fl; F A/g"),
    ("L-K08", "mk A; new A/f; ln A/f A/g; COMMIT; rm A/g; evict; F A/f"),
    ("L-K09", "mk A; new f; ln f A/2; ln f A/3; COMMIT; rm A/3; F f; rm A/2; rmdir A"),
    ("L-K10", "mk A; mk B; new A/f; ln A/f B/f; F A/f; F B/f"),
    ("L-K11", "new f; mk A; ln f A/l; F f"),
    ("L-K12", "mk A; mk B; mk A/C; new B/f; F B/f; ln B/f A/C/f; F A"),
    (
        "L-K14",
        "mk A; mk B; mk C; mk D; mk E; new A/f; ln A/f B/f; ln A/f C/f; ln A/f D/f; ln A/f E/f; \
         COMMIT; rm D/f; F A/f; rm B/f; F A/f; rm C/f; F A/f",
    ),
    (
        "L-D01",
        "mk A; new A/f; new A/g; A/g[0,4K)=g; open A x; evict; F A/f; mv A/g A/h; F A/h; close x",
    ),
    ("L-D02", "mk A; new A/f; new A/g; COMMIT; rm A/f; F A"),
    ("L-D02-dir", "mk A; mk A/f; new A/g; COMMIT; rmdir A/f; F A"),
    ("L-D02-symlink", "mk A; sym t A/f; new A/g; COMMIT; rm A/f; F A"),
    ("L-D02-fifo", "mk A; fifo A/f; new A/g; COMMIT; rm A/f; F A"),
    ("L-D05", "mk A; new A/f; COMMIT; new A/g; F A; rm A/g; rm A/f; new h; F h"),
    ("L-D06", "mk A; mk A/B; new A/B/f; COMMIT; rm A/B/f; rmdir A/B; F A; mk A/B; F A/B"),
    ("L-D07", "mk A; new A/f; COMMIT; mode A 700; F A; xa A user.k=v; F A; mode A/f 600; F A/f"),
    (
        "L-E03",
        "new f; f[0,64K)=a; f[64K,125K)=b; COMMIT; trunc f 64K; trunc f 125K; F f; trunc f 0; \
            trunc f 253K; F f",
    ),
    (
        "L-E16",
        "new f; f+700=a; F f; f+700=b; FD f; f+700=c; F f; f+700=d; FD f; f+700=e; F f; f+700=f; \
            FD f",
    ),
    (
        "L-X01",
        "new f; xa f user.1=a; xa f user.2=b; xa f user.3=c; COMMIT; xa- f user.2; F f; ✂ replay; \
         f+13=x; F f; xa- f user.1; ln f l; new g; F g",
    ),
    ("L-X02", "new f; xa f user.1=a; xa f user.2=b; xa f user.3=c; F f; COMMIT; f[0,64K)=a; F f"),
    ("L-X04", "new f; xa f user.1=a; COMMIT; xa- f user.1; F f"),
    ("L-S01", "mk A; COMMIT; sym t A/l; F A; mk B; sym u B/l; F B"),
    (
        "L-S02-symlink",
        "mk A; sym t A/s; COMMIT; new A/f; F A/f; mv A/s A/t; ln A/t A/s; new g; F g",
    ),
    ("L-S02-fifo", "mk A; fifo A/s; COMMIT; new A/f; F A/f; mv A/s A/t; ln A/t A/s; new g; F g"),
    ("L-S02-device", "mk A; dev A/s; COMMIT; new A/f; F A/f; mv A/s A/t; ln A/t A/s; new g; F g"),
    ("L-S03", "mk A; COMMIT; new A/f; F A; sym A/f A/l; mv A/l A/m; F A"),
    ("L-S04", "mk A; dev A/d; fifo A/p; sock A/s; F A"),
    // What was cut off by the time of the first fsync is a hole by that of the second, and in the
    // last commit.
    ("E-cut-logged-grown", "new f; f[0,16K)=a; COMMIT; trunc f 0; F f; trunc f 32K; F f"),
    ("E-cut-logged-written", "new f; f[0,16K)=a; COMMIT; trunc f 3000; F f; f[20K,32K)=b; F f"),
    (
        "E-cut-logged-reserved",
        "new f; f[0,16K)=a; COMMIT; trunc f 5000; F f; alloc f[20K,32K); F f; zero f[40K,50K); F f",
    ),
    (
        "E-cut-logged-cloned",
        "new f; f[0,16K)=a; new g; g[0,12K)=c; COMMIT; trunc f 0; F f; copy g[0,12K)>f@20K; F f",
    ),
    // Some of what one item has of a preallocated extent is in the last commit, some is new.
    (
        "E-reserved-filled",
        "new h; alloc h[0,64K); h[0,8K)=a; COMMIT; h[8K,16K)=b; F h; h[24K,28K)=c; F h; \
            h[16K,24K)=d; FD h",
    ),
    (
        "E-reserved-filled-twice",
        "new h; alloc h[0,64K); h[0,8K)=a; COMMIT; h[8K,16K)=b; copy h[4K,16K)>h@64K; F h; \
            h[68K,72K)=c; F h",
    ),
    // Holes in front of what is written behind the end: where they have items, a log needs these.
    (
        "H-beyond",
        "new f; f[0,4K)=a; COMMIT; f[512K,516K)=b; F f; f[128K,132K)=c; FD f; f[1M,1028K)=d; F f; \
            f[700K,704K)=e; F f",
    ),
    (
        "H-beyond-new",
        "new f; f[512K,516K)=a; F f; f[64K,68K)=b; F f; new g; g[80K,90001)=c; trunc g 200K; F g",
    ),
    (
        "H-reserved",
        "new f; alloc= f[0,1M); COMMIT; f[512K,516K)=a; FD f; f[128K,132K)=b; FD f; \
         f[960K,964K)=c; FD f; f[300K,308K)=d; FD f",
    ),
    (
        "H-reserved-apart",
        "new f; f[0,5000)=a; alloc= f[256K,512K); COMMIT; f[300K,304K)=b; F f; f[700K,704K)=c; F \
            f; trunc f 1M; F f",
    ),
    (
        "H-cloned-reserved",
        "new f; alloc f[0,64K); f[0,16K)=a; COMMIT; copy f[32K,48K)>f@256K; F f; copy \
         f[0,16K)>f@512K; F f; copy f[8K,40K)>f@900K; F f",
    ),
    (
        "H-cloned-behind-reserved",
        "new f; f[0,64K)=a; alloc= f[64K,256K); COMMIT; copy f[0,32K)>f@512K; F f; copy \
            f[0,64K)>f@100K; F f",
    ),
    (
        "H-cloned-elsewhere",
        "new f; f[0,64K)=a; new g; COMMIT; copy f[4K,20K)>g@128K; F g; copy g[128K,140K)>f@300K; \
         F f; F g",
    ),
    (
        "H-grown",
        "new f; f[0,5000)=a; COMMIT; trunc f 1M; F f; f[2M,2052K)=b; F f; punch f[0,8K); F f",
    ),
    (
        "H-grown-again",
        "new f; f[0,64K)=a; F f; trunc f 20K; f[100K,104K)=b; F f; trunc f 30K; trunc f 90K; F f",
    ),
    (
        "H-tree",
        "mk A; mk A/B; new A/f; A/f[40K,41K)=a; new A/B/g; A/B/g[4K,70000)=b; COMMIT; new A/B/h; \
         A/B/h[1M,1028K)=c; A/f[100K,120K)=d; trunc A/B/g 300K; F A/B; F A/f; F A/B/g; F A/B/h",
    ),
    ("L-Z01", "new f; f[0,300)=a; F f; f+300=b; F f; f[0,9000)=c; F f; trunc f 100; F f"),
    ("L-O01", "tmp h; @h[0,64K)=a; F @h"),
    ("L-O01-linked", "tmp h; @h[0,64K)=a; F @h; ln @h f; F f; close h"),
    ("L-O02", "new f; f[0,5000)=a; COMMIT; open f h; rm f; F @h"),
    // Nothing is left in the log of what it had: it must say so, and its nodes are used again.
    ("O-logged-then-nameless", "new f; F f; open f h; rm f; F @h"),
    (
        "O-logged-then-nameless-reused",
        "new f; F f; open f h; rm f; F @h; new g; F g; open g i; rm g; F @i; F @h",
    ),
    ("L-O03", "new f; f[0,1M)=a; COMMIT; open f h; rm f; COMMIT; new g; F g; close h; COMMIT"),
    (
        "L-O05",
        "new f; f[0,8K)=a; f[1M,1052672)=b; f[2M,2101248)=c; COMMIT; trunc f 5000; COMMIT; trunc \
         f 0",
    ),
    ("L-Y01", "new f; f+4K=a; FD f; f[0,4K)=b; FD f"),
    ("L-Y03", "mk A; mk A/B; new A/B/f; A/B/f[0,70000)=a; xa A/B/f user.k=v; mode A/B 711; COMMIT"),
    ("L-Y05", "new f; f[0,4K)=a; F f; F f; F f; ln f g; F f"),
];

/// The same for subvolumes and deduplication, which only Larder and Linux have.
const SHARED: &[(&str, &str)] = &[
    (
        "L-F07",
        "sub S; sub U; new S/f; new U/f; new z; z[0,64K)=z; COMMIT; S/f[0,64K)=a; copy \
            S/f[32K,64K)>U/f@32K; U/f[0,4K)=b; F S/f; F U/f",
    ),
    (
        "L-F07-back",
        "sub S; sub U; new S/f; new U/f; new z; z[0,64K)=z; COMMIT; U/f[0,64K)=a; copy \
            U/f[32K,64K)>S/f@32K; S/f[0,4K)=b; F U/f; F S/f",
    ),
    ("L-V01", "sub S; new S/f; COMMIT; mv S T; T/f[0,9000)=a; F T/f; rm T/f; F T"),
    ("L-V01-unchanged", "sub S; new S/f; S/f[0,9000)=a; COMMIT; mv S T; F T/f"),
    (
        "L-V02",
        "mk A; mk A/B; sub A/B/S; new A/B/S/f; COMMIT; mv A B; B/B/S/f[0,9000)=a; F B/B/S/f; new \
            g; F g",
    ),
    (
        "L-V03",
        "sub S; new S/f; S/f[0,44K)=a; xa S/f user.k=v; snap S>T; rm T/f; new T/g; T/g[8K,9K)=b; \
         F T/g",
    ),
    (
        "L-V03-mount",
        "new e; new f; f[0,44K)=a; xa f user.k=v; COMMIT; ✂ replay; rm f; new g; g[8K,9K)=b; F g",
    ),
    (
        "L-V04",
        "sub S; new S/f; S/f[0,64K)=a; F S/f; snap= S>T; S/f[0,8K)=b; F S/f; F T/f; snap S>U; \
            U/f+9K=c; F U/f",
    ),
    (
        "L-V05",
        "sub S; new S/f; S/f[0,64K)=a; snap S>T; S/f[0,8K)=b; F S/f; T/f[8K,16K)=c; F T/f; sub- \
         S; F T/f",
    ),
    (
        "V-logged-then-nameless",
        "sub S; COMMIT; new S/f; F S/f; new g; F g; open S/f h; rm S/f; F @h; new k; F k; open g \
            i; rm g; F @i",
    ),
    ("L-V06", "sub S; new S/f; snap= S>T; COMMIT; new f; F f; sub- T; sub- S; F f"),
    (
        "L-V07",
        "sub S; new S/f; COMMIT; sub S/T; new S/T/g; F S/T/g; mv S/T T; T/g+9K=a; F T/g; F S/f",
    ),
    (
        "V-nested",
        "mk A; sub A/S; new A/S/f; sub S; mk S/d; sub S/d/N; new S/f; COMMIT; snap />T; new \
         T/A/g; F T/A/g; snap S>U; rmdir U/d/N; F U/d; snap T>S/W; rmdir S/W/A/S; F S/W/A; mv T/A \
         T/B; F T/B; sub- U",
    ),
    (
        "L-W01",
        "new f; f[0,64K)=a; new g; g[0,64K)=a; COMMIT; dedupe f[0,64K)>g@0; F g; g[0,4K)=b; F g; \
            rm f; COMMIT",
    ),
    (
        "L-W02",
        "new f; f[0,64K)=a; new g; g[0,64K)=a; dedupe f[0,64K)>g@0; F g; dedupe g[8K,32K)>f@8K; F \
            f; F g",
    ),
    (
        "L-W03",
        "new f; f[0,9000)=a; new g; g[0,9000)=a; F g; dedupe f[0,9000)>g@0; F g; g+100=b; F g; \
            trunc f 5000; F f",
    ),
    (
        "L-W04",
        "new f; f[0,16K)=A; copy f[0,16K)>f@32K; copy f[0,16K)>f@64K; COMMIT; dedupe \
            f[32K,48K)>f@0; F f; rm f",
    ),
    (
        "L-W05",
        "sub S; new S/f; S/f[0,40K)=a; new f; f[0,40K)=a; snap= S>T; dedupe f[0,40K)>T/f@0; F \
         T/f; F f; sub- S",
    ),
];

/// Scenarios of subvolumes and deduplication.
///
/// # Panics
/// A scenario is not in the notation.
#[must_use]
pub fn shared() -> Vec<Workload> {
    let script = |(name, text): &(&str, &str)| {
        Workload::script(*name, text).unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    SHARED.iter().map(script).collect()
}

fn matrix_of_links() -> Vec<(String, String)> {
    let mut out = Vec::new();
    for (source, link) in
        [("f", "g"), ("f", "A/f"), ("A/f", "f"), ("A/f", "A/g"), ("A/f", "g"), ("f", "A/g")]
    {
        for sync in ["A", "/", source, link, "n", "A/n"] {
            let neighbour =
                if sync.ends_with('n') { format!("new {sync}; ") } else { String::new() };
            out.push((
                format!("L-K13 {source} {link} {sync}"),
                format!(
                    "mk A; new {source}; {source}+5000=a; COMMIT; ln {source} {link}; \
                     {neighbour}F {sync}"
                ),
            ));
        }
    }
    out
}

fn many_names() -> Vec<(String, String)> {
    let names = |from: usize, to: usize| (from..to).map(|i| format!("A/name-number-{i:04}"));
    let mut out = Vec::new();
    let news: String = names(0, 150).map(|n| format!("new {n}; ")).collect();
    out.push(("L-N07".into(), format!("mk A; {news}F A")));
    let removed: String = names(0, 150)
        .enumerate()
        .filter(|(i, _)| (50..100).contains(i) || i % 10 == 0)
        .map(|(_, n)| format!("rm {n}; "))
        .collect();
    out.push(("L-D03".into(), format!("mk A; {news}COMMIT; {removed}F A")));
    let mut rounds =
        format!("mk A; {}COMMIT; ", names(0, 40).map(|n| format!("new {n}; ")).collect::<String>());
    for round in 0..5 {
        rounds += &names(round * 7, round * 7 + 5).map(|n| format!("rm {n}; ")).collect::<String>();
        rounds += &names(40 + round * 5, 45 + round * 5)
            .map(|n| format!("new {n}; "))
            .collect::<String>();
        rounds += "F A; ";
    }
    out.push(("L-D04".into(), rounds));
    let links = |from: usize, to: usize| {
        (from..to).map(|i| format!("ln f a-link-with-a-long-name-{i:05}; ")).collect::<String>()
    };
    out.push(("L-K02".into(), format!("new f; {}COMMIT; {}F f", links(0, 300), links(300, 301))));
    out.push((
        "L-K03".into(),
        format!(
            "new f; {}COMMIT; rm a-link-with-a-long-name-00001; rm a-link-with-a-long-name-00002; \
                {}{}{}F f",
            links(0, 300),
            links(300, 301),
            links(1, 2),
            links(301, 303)
        ),
    ));
    out
}

/// Files of many extents that are cut, and what was reserved and is written in place.
fn many_extents() -> Vec<(String, String)> {
    let blocks = |step: usize| {
        (0..60).map(|i| format!("f[{}K,{}K)=a; ", i * step, i * step + 4)).collect::<String>()
    };
    let with =
        |name: &str, end: &str| (name.to_owned(), format!("new f; {}COMMIT; {end}", blocks(8)));
    let mut out = vec![
        with("E-cut", "trunc f 0; COMMIT"),
        with("E-cut-part", "trunc f 100000; F f; f[0,4K)=b; F f"),
        with("E-unlink", "rm f; COMMIT"),
        with("E-open", "open f h; rm f; COMMIT; close h; COMMIT"),
        with("E-punch", "punch f[5000,400000); F f"),
        with("E-zero", "zero f[5000,400000); F f; f[8K,100K)=b; F f"),
        with("E-fill", "alloc f[0,1M); F f; f[1000,300000)=c; F f"),
    ];
    let lines = [
        (
            "E-reserved",
            "new f; alloc f[0,64K); COMMIT; f[0,16K)=a; F f; f[4K,8K)=b; f[30K,50001)=c; F f",
        ),
        (
            "E-reserved-end",
            "new f; alloc= f[0,64K); F f; f+100=a; F f; f+30000=b; COMMIT; trunc f 200; F f",
        ),
        (
            "E-reserved-cut",
            "new f; f[0,20K)=a; alloc= f[0,64K); F f; trunc f 5000; F f; f[0,64K)=b; F f",
        ),
        (
            "E-nocow",
            "new f; nocow f; f[0,64K)=a; COMMIT; f[1000,20001)=b; F f; f[0,64K)=c; COMMIT; \
                f[3,9K)=d",
        ),
        (
            "E-nocow-cut",
            "new f; nocow f; f[0,64K)=a; F f; f[0,30K)=b; trunc f 10001; F f; trunc f 64K; \
                f[9K,20K)=c; F f",
        ),
        (
            "E-nocow-punch",
            "new f; nocow f; f[0,64K)=a; F f; f[0,30K)=b; punch f[4K,20001); F f; f[0,30K)=c; F f",
        ),
        (
            "E-small",
            "new f; f[0,300)=a; COMMIT; alloc= f[0,20K); F f; f[100,200)=b; F f; zero f[50,9000); \
                F f",
        ),
    ];
    out.extend(lines.map(|(name, text)| (name.to_owned(), text.to_owned())));
    out
}

/// All scenarios. `many`: also those with hundreds of names.
///
/// # Panics
/// A scenario is not in the notation.
#[must_use]
pub fn all(many: bool) -> Vec<Workload> {
    let lines = LINES.iter().map(|(n, t)| ((*n).to_owned(), (*t).to_owned()));
    let more = if many { many_names() } else { Vec::new() };
    lines
        .chain(many_extents())
        .chain(matrix_of_links())
        .chain(more)
        .map(|(name, text)| {
            Workload::script(&name, &text).unwrap_or_else(|e| panic!("{name}: {e}"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::World;
    use std::collections::HashSet;

    #[test]
    fn every_scenario_is_possible() {
        let mut names = HashSet::new();
        for workload in all(true).into_iter().chain(shared()) {
            assert!(names.insert(workload.name.clone()), "{} is there twice", workload.name);
            let mut world = World::empty(0o755, 256);
            for segment in &workload.segments {
                for op in &segment.threads[0] {
                    world.apply(op).unwrap_or_else(|e| panic!("{}: {op}: {e:?}", workload.name));
                }
            }
        }
    }
}
