//! Pictures of a benchmark: panels of lines over one horizontal axis, as SVG and as PNG.
//!
//! Nothing of the system is needed: text is measured, and set in a PNG, with the Latin letters of DejaVu Sans from
//! `assets/`. An SVG names no more than a sans-serif font, which its viewer picks.
//!
//! Invariants:
//! - values that a scale has no place for (zero on a logarithm, no numbers) are left out, never drawn elsewhere;
//! - axes are in the units that their labels name, ticks at round values.
//!
//! Not here: what is drawn (`io`, `sweep_figure`).

use std::fs;
use std::io::BufWriter;
use std::ops::Range;
use std::path::Path;

use anyhow::{anyhow, Context, Result};
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::register_font;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// `pyftsubset DejaVuSans.ttf --no-hinting --layout-features=` over Latin-1, dashes and comparisons.
const FONT: &[u8] = include_bytes!("../../../assets/dejavu-sans/DejaVuSans-Latin.ttf");
const FAMILY: &str = "sans-serif";
const WIDTH: u32 = 920;
const HEAD_HEIGHT: u32 = 82;
const PANEL_HEIGHT: u32 = 300;
const LEGEND_WIDTH: u32 = 170;
const LEGEND_LINE: i32 = 24;
/// Radius of a mark.
const DOT: u32 = 4;
/// Most ticks of an axis, about.
const TICKS: f64 = 6.0;
/// Free space beside the least and the most of a logarithm, as a share of its length.
const LOG_MARGIN: f64 = 0.06;
const TEXT: RGBColor = RGBColor(40, 40, 40);
const FAINT: RGBColor = RGBColor(110, 110, 110);
const GRID: RGBColor = RGBColor(222, 222, 222);
/// Okabe and Ito's colours, which colour-blind people tell apart; the last one is for the rest.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
    RGBColor(130, 130, 130),
];

/// One picture.
pub(crate) struct Figure {
    pub(crate) title: String,
    /// What it was measured with, below the title; one or two lines.
    pub(crate) note: String,
    pub(crate) x: Axis,
    /// From top to bottom; the legend has the lines of the first.
    pub(crate) panels: Vec<Panel>,
}

/// Lines over the figure's horizontal axis.
pub(crate) struct Panel {
    pub(crate) y: Axis,
    pub(crate) lines: Vec<Line>,
}

/// What an axis shows, with its unit.
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) scale: Scale,
    /// Values that are called something else, and get a tick.
    pub(crate) names: Vec<(f64, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    /// From zero.
    Linear,
    Log2,
    Log10,
}

/// Marks of one kind, joined.
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) marks: Vec<Mark>,
}

/// A value, and the least and the most of it where those are worth showing.
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) range: Option<(f64, f64)>,
}

/// An axis laid out: places are what the scale makes of values.
struct Layout {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

impl Scale {
    /// A logarithm where values differ by more than three times.
    pub(crate) fn for_spread(values: impl Iterator<Item = f64> + Clone) -> Self {
        let most = values.clone().fold(0.0, f64::max);
        let least = values.fold(f64::INFINITY, f64::min);
        match least > 0.0 && most > 3.0 * least {
            true => Self::Log10,
            false => Self::Linear,
        }
    }

    /// Where a value goes.
    fn place(self, value: f64) -> Option<f64> {
        let place = match self {
            Self::Linear => value,
            Self::Log2 => value.log2(),
            Self::Log10 => value.log10(),
        };
        place.is_finite().then_some(place)
    }

    fn value(self, place: f64) -> f64 {
        match self {
            Self::Linear => place,
            Self::Log2 => place.exp2(),
            Self::Log10 => 10f64.powf(place),
        }
    }
}

impl Axis {
    pub(crate) fn new(label: &str, scale: Scale) -> Self {
        Self {
            label: label.to_owned(),
            scale,
            names: Vec::new(),
        }
    }

    /// Room for all `values`, and ticks at round ones.
    fn layout(&self, values: impl Iterator<Item = f64>) -> Layout {
        let places = values.filter_map(|value| self.scale.place(value));
        let (least, most) = places.fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), at| {
            (least.min(at), most.max(at))
        });
        let (least, most) = if least <= most {
            (least, most)
        } else {
            (0.0, 1.0)
        };
        let (low, high) = match self.scale {
            Scale::Linear => (least.min(0.0), if most > 0.0 { 1.06 * most } else { 1.0 }),
            Scale::Log2 | Scale::Log10 => {
                let margin = ((most - least) * LOG_MARGIN).max(0.05);
                (least - margin, most + margin)
            }
        };
        let mut ticks = match self.scale {
            Scale::Linear => linear_ticks(high),
            Scale::Log2 => (low.ceil() as i32..=high.floor() as i32)
                .map(f64::from)
                .collect(),
            Scale::Log10 => decade_ticks(high - low, low),
        };
        let named = self.names.iter();
        let named: Vec<f64> = named
            .filter_map(|(value, _)| self.scale.place(*value))
            .collect();
        ticks.retain(|tick| (low..=high).contains(tick) && !named.contains(tick));
        ticks.extend(named);
        Layout { low, high, ticks }
    }

    /// How the tick at a place reads.
    fn text(&self, place: f64) -> String {
        let value = self.scale.value(place);
        let is_it = |(named, _): &&(f64, String)| (named / value - 1.0).abs() < 1e-6;
        match self.names.iter().find(is_it) {
            Some((_, name)) => name.clone(),
            None => short(value),
        }
    }
}

impl Ranged for Layout {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, place: &f64, (start, end): (i32, i32)) -> i32 {
        let share = (place - self.low) / (self.high - self.low);
        start + (share * f64::from(end - start)).round() as i32
    }

    fn key_points<H: KeyPointHint>(&self, hint: H) -> Vec<f64> {
        match hint.weight().allow_light_points() {
            true => Vec::new(),
            false => self.ticks.clone(),
        }
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

/// Multiples of 1, 2 or 5 times a power of ten, from 0 up to `high`.
fn linear_ticks(high: f64) -> Vec<f64> {
    let rough = high / TICKS;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
    let step = step.into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(high).max(f64::MIN_POSITIVE);
    (0..=2 * TICKS as i32)
        .map(|index| f64::from(index) * step)
        .collect()
}

/// Round values as places, denser where few decades are shown.
fn decade_ticks(decades: f64, low: f64) -> Vec<f64> {
    let digits: &[f64] = match decades {
        few if few < 0.9 => &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
        some if some < 2.5 => &[1.0, 2.0, 5.0],
        _ => &[1.0],
    };
    let first = low.floor() as i32;
    let powers = first..=first + decades.ceil() as i32 + 1;
    let ticks = powers.flat_map(|power| digits.iter().map(move |digit| (power, *digit)));
    ticks
        .map(|(power, digit)| f64::from(power) + digit.log10())
        .collect()
}

/// A number with no more digits than its size is worth.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        large if large >= 99.95 => 0,
        middle if middle >= 9.995 => 1,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    if digits == 0 {
        return text;
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

impl Figure {
    /// Writes `NAME.svg` and `NAME.png` into the folder.
    pub(crate) fn write(&self, folder: &Path, name: &str) -> Result<()> {
        register_font(FAMILY, FontStyle::Normal, FONT)
            .map_err(|_| anyhow!("the font inside this program cannot be read"))?;
        let panels = self.panels.len().max(1) as u32;
        let size = (WIDTH, HEAD_HEIGHT + panels * PANEL_HEIGHT);
        let mut svg = String::new();
        self.draw(SVGBackend::with_string(&mut svg, size).into_drawing_area())?;
        let path = folder.join(format!("{name}.svg"));
        fs::write(&path, svg).with_context(|| path.display().to_string())?;
        let mut pixels = vec![0; 3 * (size.0 * size.1) as usize];
        self.draw(BitMapBackend::with_buffer(&mut pixels, size).into_drawing_area())?;
        let path = folder.join(format!("{name}.png"));
        write_png(&path, size, &pixels).with_context(|| path.display().to_string())
    }

    fn draw<B: DrawingBackend>(&self, root: DrawingArea<B, Shift>) -> Result<()>
    where
        B::ErrorType: 'static,
    {
        root.fill(&WHITE)?;
        let (head, body) = root.split_vertically(HEAD_HEIGHT);
        head.draw_text(&self.title, &style(19, TEXT), (16, 12))?;
        for (index, line) in self.note.lines().enumerate() {
            head.draw_text(line, &style(13, FAINT), (16, 40 + 18 * index as i32))?;
        }
        let (body, legend) = body.split_horizontally(WIDTH - LEGEND_WIDTH);
        let panels = body.split_evenly((self.panels.len().max(1), 1));
        let last = self.panels.len().saturating_sub(1);
        for (index, (area, panel)) in panels.iter().zip(&self.panels).enumerate() {
            self.draw_panel(area, panel, index == last)?;
        }
        if let Some(panel) = self.panels.first() {
            draw_legend(&legend, &panel.lines)?;
        }
        Ok(root.present()?)
    }

    fn draw_panel<B: DrawingBackend>(
        &self,
        area: &DrawingArea<B, Shift>,
        panel: &Panel,
        is_last: bool,
    ) -> Result<()>
    where
        B::ErrorType: 'static,
    {
        let all = self.panels.iter().flat_map(|panel| &panel.lines);
        let x = self.x.layout(all.flat_map(Line::xs));
        let y = panel.y.layout(panel.lines.iter().flat_map(Line::ys));
        let mut chart = ChartBuilder::on(area)
            .margin_top(6)
            .margin_right(12)
            .margin_bottom(8)
            .margin_left(8)
            .x_label_area_size(if is_last { 46 } else { 24 })
            .y_label_area_size(68)
            .build_cartesian_2d(x, y)?;
        let description = if is_last { self.x.label.as_str() } else { "" };
        chart
            .configure_mesh()
            .axis_style(FAINT)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .label_style(style(14, TEXT))
            .axis_desc_style(style(15, TEXT))
            .x_desc(description)
            .y_desc(panel.y.label.as_str())
            .x_label_formatter(&|place| self.x.text(*place))
            .y_label_formatter(&|place| panel.y.text(*place))
            .draw()?;
        for (index, line) in panel.lines.iter().enumerate() {
            let colour = COLOURS[index.min(COLOURS.len() - 1)];
            let place =
                |at: f64, value: f64| Some((self.x.scale.place(at)?, panel.y.scale.place(value)?));
            let marks = line.marks.iter();
            let places: Vec<(f64, f64)> = marks.filter_map(|mark| place(mark.x, mark.y)).collect();
            let whiskers = line.marks.iter().filter_map(|mark| {
                let (least, most) = mark.range?;
                Some(vec![place(mark.x, least)?, place(mark.x, most)?])
            });
            chart.draw_series(whiskers.map(|ends| PathElement::new(ends, colour.mix(0.35))))?;
            chart.draw_series(LineSeries::new(
                places.iter().copied(),
                colour.stroke_width(2),
            ))?;
            let dots = places
                .iter()
                .map(|at| Circle::new(*at, DOT, colour.filled()));
            chart.draw_series(dots)?;
        }
        Ok(())
    }
}

impl Line {
    fn xs(&self) -> impl Iterator<Item = f64> + '_ {
        self.marks.iter().map(|mark| mark.x)
    }

    fn ys(&self) -> impl Iterator<Item = f64> + '_ {
        self.marks.iter().flat_map(|mark| {
            let (least, most) = mark.range.unwrap_or((mark.y, mark.y));
            [mark.y, least, most]
        })
    }
}

fn style(size: u32, colour: RGBColor) -> TextStyle<'static> {
    (FAMILY, size).into_font().color(&colour)
}

/// Colours and names, from the top.
fn draw_legend<B: DrawingBackend>(area: &DrawingArea<B, Shift>, lines: &[Line]) -> Result<()>
where
    B::ErrorType: 'static,
{
    let text = style(14, TEXT).pos(Pos::new(HPos::Left, VPos::Center));
    for (index, line) in lines.iter().enumerate() {
        let colour = COLOURS[index.min(COLOURS.len() - 1)];
        let y = 16 + LEGEND_LINE * index as i32;
        area.draw(&PathElement::new(
            vec![(4, y), (28, y)],
            colour.stroke_width(2),
        ))?;
        area.draw(&Circle::new((16, y), DOT, colour.filled()))?;
        area.draw_text(&line.name, &text, (36, y))?;
    }
    Ok(())
}

fn write_png(path: &Path, (width, height): (u32, u32), pixels: &[u8]) -> Result<()> {
    let file = BufWriter::new(fs::File::create(path)?);
    let mut encoder = png::Encoder::new(file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    Ok(writer.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(x: f64, y: f64) -> Mark {
        Mark { x, y, range: None }
    }

    fn values(axis: &Axis, values: &[f64]) -> Vec<String> {
        let layout = axis.layout(values.iter().copied());
        layout.ticks.iter().map(|tick| axis.text(*tick)).collect()
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let linear = Axis::new("ms", Scale::Linear);
        assert_eq!(
            values(&linear, &[3.0, 97.0]),
            ["0", "20", "40", "60", "80", "100"]
        );
        assert_eq!(
            values(&linear, &[0.0, 0.0]),
            ["0", "0.2", "0.4", "0.6", "0.8", "1"]
        );
        let log = Axis::new("ms", Scale::Log10);
        assert_eq!(values(&log, &[80.0, 700.0]), ["100", "200", "500"]);
        assert_eq!(values(&log, &[0.5, 400.0]), ["1", "10", "100"]);
        assert_eq!(values(&log, &[120.0, 390.0]), ["150", "200", "300", "400"]);
        let mut windows = Axis::new("tokens", Scale::Log2);
        windows.names.push((32.0, "none".to_owned()));
        assert_eq!(
            values(&windows, &[1.0, 3.0, 16.0, 32.0]),
            ["1", "2", "4", "8", "16", "none"]
        );
    }

    #[test]
    fn a_wide_spread_gets_a_logarithm() {
        let of = |values: &[f64]| Scale::for_spread(values.iter().copied());
        assert_eq!(of(&[10.0, 31.0]), Scale::Log10);
        assert_eq!(of(&[10.0, 29.0]), Scale::Linear);
        assert_eq!(of(&[0.0, 29.0]), Scale::Linear);
        assert_eq!(of(&[]), Scale::Linear);
    }

    #[test]
    fn both_files_are_written_whatever_the_values() {
        let folder = tempfile::tempdir().unwrap();
        let line = |name: &str, marks: Vec<Mark>| Line {
            name: name.to_owned(),
            marks,
        };
        let whisker = Mark {
            range: Some((5.0, 60.0)),
            ..mark(2.0, 20.0)
        };
        let drawn = line("<drawn> & \"quoted\"", vec![mark(1.0, 10.0), whisker]);
        let odd = line("odd", vec![mark(0.0, f64::NAN), mark(3.0, -1.0)]);
        let figure = Figure {
            title: "a title".to_owned(),
            note: "a note".to_owned(),
            x: Axis::new("places", Scale::Linear),
            panels: vec![
                Panel {
                    y: Axis::new("ms", Scale::Log10),
                    lines: vec![drawn, odd],
                },
                Panel {
                    y: Axis::new("MB", Scale::Linear),
                    lines: Vec::new(),
                },
            ],
        };
        figure.write(folder.path(), "figure").unwrap();
        let svg = fs::read_to_string(folder.path().join("figure.svg")).unwrap();
        assert!(svg.trim_end().ends_with("</svg>"), "{svg}");
        // One dot each for the marks that have a place, and one for each name.
        assert_eq!(svg.matches("<circle").count(), 2 + 2);
        assert!(svg.contains("&lt;drawn&gt; &amp;") && svg.contains("places"));
        let png = fs::File::open(folder.path().join("figure.png")).unwrap();
        let mut reader = png::Decoder::new(std::io::BufReader::new(png))
            .read_info()
            .unwrap();
        assert_eq!(
            reader.info().size(),
            (WIDTH, HEAD_HEIGHT + 2 * PANEL_HEIGHT)
        );
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        let RGBColor(red, green, blue) = COLOURS[0];
        assert!(pixels.chunks(3).any(|pixel| pixel == [red, green, blue]));
        assert!(figure.write(&folder.path().join("none"), "figure").is_err());
    }
}
