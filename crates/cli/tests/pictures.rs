//! Pictures look the same in a browser and in a renderer that knows little of style sheets: the
//! colours that they name are there, and nothing is cut off.

mod common;

use common::{inside, larder};
use larder_simtest::oracle::{Need, need, scratch};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

type Rgb = [u8; 3];

/// A rendered picture: lines of pixels.
struct Picture(Vec<Vec<Rgb>>);

impl Picture {
    fn read(png: &Path) -> Self {
        let file = std::io::BufReader::new(std::fs::File::open(png).expect("a picture"));
        let mut decoder = png::Decoder::new(file);
        decoder.set_transformations(png::Transformations::normalize_to_color8());
        let mut reader = decoder.read_info().expect("a PNG");
        let mut bytes = vec![0; reader.output_buffer_size().expect("a size")];
        let frame = reader.next_frame(&mut bytes).expect("a frame");
        let samples = frame.color_type.samples();
        assert!(samples >= 3, "{:?}", frame.color_type);
        let pixel = |p: &[u8]| [p[0], p[1], p[2]];
        let lines = bytes[..frame.buffer_size()].chunks(frame.line_size);
        Self(lines.map(|line| line.chunks(samples).map(pixel).collect()).collect())
    }
    /// How many pixels have which colour.
    fn colours(&self) -> BTreeMap<Rgb, usize> {
        let mut counts = BTreeMap::new();
        self.0.iter().flatten().for_each(|p| *counts.entry(*p).or_default() += 1);
        counts
    }
    /// Are the outermost pixels left and right, `width` of them, all white?
    fn has_margins(&self, width: usize) -> bool {
        let white = |part: &[Rgb]| part.iter().all(|p| *p == [255; 3]);
        self.0.iter().all(|line| white(&line[..width]) && white(&line[line.len() - width..]))
    }
}

/// An SVG and what its text says.
struct Drawing {
    path: PathBuf,
    text: String,
}

impl Drawing {
    fn read(path: PathBuf) -> Self {
        let text = std::fs::read_to_string(&path).expect("an SVG");
        Self { path, text }
    }
    /// Width and height in pixels: two attributes, or the last two numbers of the view box.
    fn size(&self) -> (usize, usize) {
        let head = &self.text[..self.text.find('>').expect("a tag")];
        let attribute = |name: &str| head.split_once(name)?.1.split('"').next();
        let number = |n: &str| n.parse().expect("pixels");
        if let Some((width, height)) = attribute(" width=\"").zip(attribute(" height=\"")) {
            return (number(width), number(height));
        }
        let numbers: Vec<&str> = attribute("viewBox=\"").expect("a view box").split(' ').collect();
        (number(numbers[2]), number(numbers[3]))
    }
    /// The colours of its areas, as far as nothing shines through them.
    fn fills(&self) -> BTreeSet<Rgb> {
        let areas = self.text.split('<').filter(|e| e.starts_with("path") || e.starts_with("rect"));
        let tags =
            areas.filter_map(|e| e.split('>').next()).filter(|t| !t.contains("fill-opacity"));
        tags.filter_map(|t| rgb(t.split_once("fill=\"#")?.1.split('"').next()?)).collect()
    }
}

/// `0072b2` or `fff`.
fn rgb(hex: &str) -> Option<Rgb> {
    let digits: Vec<u8> =
        hex.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>()?;
    match digits[..] {
        [r, g, b] => Some([r * 17, g * 17, b * 17]),
        [a, b, c, d, e, f] => Some([a * 16 + b, c * 16 + d, e * 16 + f]),
        _ => None,
    }
}

fn run(command: &mut Command) {
    let out = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
}

fn by_rsvg(drawing: &Drawing, dir: &Path) -> Picture {
    let png = dir.join("rsvg.png");
    run(Command::new("rsvg-convert").arg(&drawing.path).arg("-o").arg(&png));
    Picture::read(&png)
}

/// All of them by one start of the browser: beneath each other on a page.
fn by_browser(drawings: &[Drawing], dir: &Path, dark: bool) -> Vec<Picture> {
    let mut page = String::from("<!doctype html><body style='margin:0'>");
    let (mut width, mut height) = (0, 0);
    for drawing in drawings {
        let (w, h) = drawing.size();
        page += &format!(
            "<img src='file://{}' width={w} height={h} \
                style='position:absolute;left:0;top:{height}px'>",
            drawing.path.display()
        );
        (width, height) = (width.max(w), height + h);
    }
    let (html, png) = (dir.join("page.html"), dir.join("page.png"));
    std::fs::write(&html, page).expect("write");
    // It draws nothing but our own files, and root has no other way to start it.
    run(Command::new("timeout")
        .args([
            "120",
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ])
        .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!dark)))
        .arg(format!("--user-data-dir={}", dir.join("browser").display()))
        .arg(format!("--window-size={width},{height}"))
        .arg(format!("--screenshot={}", png.display()))
        .arg(format!("file://{}", html.display())));
    let mut lines = Picture::read(&png).0.into_iter();
    let one = |d: &Drawing| {
        let (w, h) = d.size();
        Picture(lines.by_ref().take(h).map(|line| line[..w].to_vec()).collect())
    };
    drawings.iter().map(one).collect()
}

/// A map on which there is something of everything.
fn map_of_a_made_image(dir: &Path) -> PathBuf {
    let (image, map) = (dir.join("a.img"), dir.join("a.svg"));
    larder(args!["mkfs", "--size", "1G", "-L", "Pictures", &image]).ok();
    for i in 0..6 {
        let file = dir.join("data");
        std::fs::write(&file, vec![i; 9 << 20]).expect("write");
        larder(args!["cp", &file, inside(&image, &format!("/{i}"))]).ok();
    }
    larder(args!["map", "--cells", "4096", &image, "-o", &map]).ok();
    map
}

#[test]
fn pictures_are_drawn_alike_by_a_browser_and_by_another_renderer() {
    if !need(&[Need::Renderers]) {
        return;
    }
    let dir = scratch();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let docs = docs.canonicalize().expect("the documents");
    let files =
        std::fs::read_dir(docs).expect("the documents").map(|e| e.expect("an entry").path());
    let mut paths: Vec<PathBuf> =
        files.filter(|p| p.extension().is_some_and(|e| e == "svg")).collect();
    assert!(paths.len() > 5, "{paths:?}");
    paths.push(map_of_a_made_image(dir.path()));
    let drawings: Vec<Drawing> = paths.into_iter().map(Drawing::read).collect();
    for (drawing, browser) in drawings.iter().zip(by_browser(&drawings, dir.path(), false)) {
        let name = drawing.path.file_name().expect("a name").display().to_string();
        let rsvg = by_rsvg(drawing, dir.path());
        let fills = drawing.fills();
        let least = if name.contains("bench") { 2 } else { 8 };
        assert!(fills.len() >= least, "{name} has only {fills:?}");
        let counts = [&browser, &rsvg].map(Picture::colours);
        for fill in fills {
            let [ours, theirs] =
                counts.each_ref().map(|c| c.get(&fill).copied().unwrap_or_default());
            let alike = ours > 20 && theirs > 20 && ours.abs_diff(theirs) <= ours.max(theirs) / 4;
            assert!(alike, "{name}: {ours} pixels of {fill:x?} in the browser, {theirs} otherwise");
        }
        for (picture, counts) in [&browser, &rsvg].into_iter().zip(counts) {
            let black = counts.get(&[0; 3]).copied().unwrap_or_default();
            let all: usize = counts.values().sum();
            assert!(black < all / 50, "{name}: {black} of {all} pixels are black");
            assert!(picture.has_margins(3), "{name} is cut off");
        }
    }
}

/// A reader may prefer a dark ground: the ground and all areas change with it.
#[test]
fn maps_have_a_dark_form() {
    if !need(&[Need::Renderers]) {
        return;
    }
    let dir = scratch();
    let drawings = [Drawing::read(map_of_a_made_image(dir.path()))];
    let [light, dark] =
        [false, true].map(|dark| by_browser(&drawings, dir.path(), dark)[0].colours());
    let most = |counts: &BTreeMap<Rgb, usize>| counts.iter().max_by_key(|c| c.1).map(|c| *c.0);
    assert_eq!([most(&light), most(&dark)], [rgb("fff"), rgb("14171c")], "the ground");
    // The colours of age are the last that a rule could miss.
    assert!(dark.get(&rgb("fdea45").expect("a colour")).is_some_and(|n| *n > 20));
}
