//! Colours and letters, as every viewer shows them.
//!
//! Image viewers, office programs and most renderers know attributes like `fill="#0072b2"`, but
//! little or nothing of style sheets: a colour that only a style sheet sets is black there. So
//! every shape and every text has its look as attributes, on a light ground that the picture has
//! itself. The style sheet adds what may be missing: other colours for a dark ground, figures of
//! equal width, and a border around the cell under the pointer. It finds a colour by the attribute
//! that names it, so no two colours may have the same name on the light ground.
//!
//! A reader who cannot tell red from green can tell the colours apart: they are hues of the
//! Okabe-Ito palette, viridis for age, and always differ in lightness.

use std::fmt;
use std::fmt::Write as _;

/// A colour on a light ground and on a dark one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Colour {
    light: &'static str,
    dark: &'static str,
}

impl Colour {
    const fn new(light: &'static str, dark: &'static str) -> Self {
        Self { light, dark }
    }
}

/// The name on the light ground.
impl fmt::Display for Colour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.light)
    }
}

pub(super) const GROUND: Colour = Colour::new("#fff", "#14171c");
pub(super) const INK: Colour = Colour::new("#1b1e23", "#e8eaed");
pub(super) const SOFT: Colour = Colour::new("#626973", "#9aa3ae");
pub(super) const UNALLOCATED: Colour = Colour::new("#eef0f2", "#20252c");
pub(super) const FREE: Colour = Colour::new("#d5d9de", "#353c46");
pub(super) const DATA: Colour = Colour::new("#0072b2", "#3aa0e0");
pub(super) const METADATA: Colour = Colour::new("#e69f00", "#f0b429");
pub(super) const SYSTEM: Colour = Colour::new("#b5468b", "#d977b0");
/// From the oldest to the newest.
pub(super) const AGES: [Colour; 6] = [
    Colour::new("#440154", "#6b3fa0"),
    Colour::new("#414487", "#5470c6"),
    Colour::new("#2a788e", "#3a9bb5"),
    Colour::new("#22a884", "#2fc39a"),
    Colour::new("#7ad151", "#8fe066"),
    Colour::new("#fde725", "#fdea45"),
];

fn all() -> impl Iterator<Item = Colour> {
    [GROUND, INK, SOFT, UNALLOCATED, FREE, DATA, METADATA, SYSTEM].into_iter().chain(AGES)
}

/// How strong a colour is for each step of fullness: none, then quarters.
const STRENGTHS: [&str; STEPS] = [".24", ".42", ".6", ".8", "1"];
/// Steps of fullness.
pub(super) const STEPS: usize = 5;

/// What fills a shape. Its text is attributes, with a space before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Paint {
    colour: Colour,
    step: usize,
}

impl Paint {
    /// The colour as it is.
    pub(super) const fn full(colour: Colour) -> Self {
        Self { colour, step: STEPS - 1 }
    }
    /// Weaker the lower the step of fullness.
    pub(super) fn at_step(colour: Colour, step: usize) -> Self {
        Self { colour, step: step.min(STEPS - 1) }
    }
}

impl fmt::Display for Paint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " fill=\"{}\"", self.colour)?;
        if self.step < STEPS - 1 {
            write!(f, " fill-opacity=\"{}\"", STRENGTHS[self.step])?;
        }
        Ok(())
    }
}

/// A line that the pointer passes over. Its text is attributes, with a space before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    pub(super) colour: Colour,
    pub(super) width: f64,
    pub(super) opacity: &'static str,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { colour, width, opacity } = self;
        write!(f, " fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width:.3}\"")?;
        write!(f, " stroke-opacity=\"{opacity}\" pointer-events=\"none\"")
    }
}

/// How a text looks. Its text is attributes, with a space before; what is missing is inherited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Letters {
    look: &'static str,
    soft: bool,
    anchor: &'static str,
}

impl Letters {
    pub(super) const PLAIN: Self = Self { look: "", soft: false, anchor: "" };
    pub(super) const SOFT: Self = Self { soft: true, ..Self::PLAIN };
    pub(super) const TITLE: Self =
        Self { look: " font-size=\"26\" font-weight=\"600\"", ..Self::PLAIN };
    pub(super) const HEADING: Self =
        Self { look: " font-size=\"16\" font-weight=\"600\"", ..Self::PLAIN };

    /// The place is the text's end.
    pub(super) const fn before(self) -> Self {
        Self { anchor: " text-anchor=\"end\"", ..self }
    }
    /// The place is the text's middle.
    pub(super) const fn around(self) -> Self {
        Self { anchor: " text-anchor=\"middle\"", ..self }
    }
}

impl fmt::Display for Letters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.look, self.anchor)?;
        if self.soft { write!(f, " fill=\"{SOFT}\"") } else { Ok(()) }
    }
}

/// The picture around `body`, `width` by `height`: ground, letters, and the style sheet with what
/// may be missing.
pub(super) fn frame(title: &str, width: f64, height: f64, body: &str) -> String {
    let mut dark = String::new();
    for Colour { light, dark: other } in all() {
        let _ =
            write!(dark, "[fill='{light}']{{fill:{other}}}[stroke='{light}']{{stroke:{other}}}");
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
            role=\"img\" \
         aria-label=\"Map of the space of {title}\">\n<title>{title}</title>\n\
         <style>\ntext{{font-variant-numeric:tabular-nums}}\n\
         .c path:hover{{stroke:{INK};stroke-width:.3}}\n\
         @media(prefers-color-scheme:dark){{.c path:hover{{stroke:{}}}\n{dark}}}\n</style>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"{GROUND}\"/>\n\
         <g fill=\"{INK}\" font-size=\"13\" font-family=\"system-ui,-apple-system,'Segoe \
         UI',Roboto,'Helvetica \
         Neue',sans-serif\">\n{body}</g>\n</svg>\n",
        INK.dark
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_colour_is_found_by_its_name() {
        let names: std::collections::BTreeSet<&str> = all().map(|c| c.light).collect();
        assert_eq!(names.len(), all().count());
        let framed = frame("", 10.0, 10.0, "");
        assert!(
            all().all(|c| framed.contains(&format!("[fill='{}']{{fill:{}}}", c.light, c.dark)))
        );
    }

    #[test]
    fn looks_are_attributes() {
        assert_eq!(Paint::at_step(DATA, 0).to_string(), " fill=\"#0072b2\" fill-opacity=\".24\"");
        assert_eq!(Paint::at_step(DATA, 9).to_string(), Paint::full(DATA).to_string());
        let soft = Letters::SOFT.before().to_string();
        assert_eq!(soft, " text-anchor=\"end\" fill=\"#626973\"");
    }
}
