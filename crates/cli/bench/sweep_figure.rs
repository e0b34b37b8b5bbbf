//! The picture of a sweep: time and bytes of a token, one panel above the other, a line for each text.
//!
//! Along budgets the horizontal axis is what they keep of the weights, as in the papers' figures; budgets are in the
//! table.

use super::plot::{Axis as PlotAxis, Figure, Line, Mark, Panel, Scale};
use super::sweep::Axis;
use super::sweep_table::{Point, Sweep};

impl Sweep {
    /// What there is to draw.
    pub(crate) fn figure(&self) -> Figure {
        let mut x = match self.over {
            Axis::Memory => PlotAxis::new("weights in DRAM, % of the dense model", Scale::Linear),
            Axis::Length => PlotAxis::new("tokens generated", Scale::Linear),
            Axis::Window => PlotAxis::new("window, tokens", Scale::Log2),
        };
        if self.over == Axis::Window {
            let none = self.points.iter().filter(|point| point.row.name == "none");
            x.names = none.map(|point| (point.value, "none".to_owned())).collect();
        }
        let lines = |mark: &dyn Fn(&Point) -> Mark| -> Vec<Line> {
            let line = |series: String| Line {
                marks: {
                    let points = self.points.iter().filter(|point| point.series == series);
                    points.map(mark).collect()
                },
                name: series,
            };
            self.series().into_iter().map(line).collect()
        };
        let mut times = lines(&|point| Mark {
            y: point.row.total_ms,
            range: Some((point.row.total_ms_min, point.row.total_ms_max)),
            ..self.mark(point)
        });
        if self.over != Axis::Length {
            let floors = self.points.iter().map(|point| Mark {
                y: point.row.floor_ms,
                ..self.mark(point)
            });
            times.push(Line {
                name: "floor".to_owned(),
                marks: floors.collect(),
            });
        }
        let bytes = lines(&|point| Mark {
            y: point.row.bytes_per_token / 1e6,
            ..self.mark(point)
        });
        let all_times = times.iter().flat_map(|line| &line.marks).map(|mark| mark.y);
        let axis = match self.over {
            Axis::Memory => "against weights in DRAM",
            Axis::Length => "along a text",
            Axis::Window => "against the window",
        };
        Figure {
            title: format!("{}: a token {axis}", self.name),
            note: self.note(),
            x,
            panels: vec![
                Panel {
                    y: PlotAxis::new("ms per token", Scale::for_spread(all_times)),
                    lines: times,
                },
                Panel {
                    y: PlotAxis::new("MB read per token", Scale::Linear),
                    lines: bytes,
                },
            ],
        }
    }

    /// A mark at the place of the point, its height still to come.
    fn mark(&self, point: &Point) -> Mark {
        let x = match self.over {
            Axis::Memory => 100.0 * point.resident,
            Axis::Length | Axis::Window => point.value,
        };
        Mark {
            x,
            y: 0.0,
            range: None,
        }
    }
}
