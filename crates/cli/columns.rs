//! Two texts side by side, in columns that fit a terminal.

/// Characters of a column.
const WIDTH: usize = 46;
/// Between the columns.
const GAP: &str = "  |  ";

/// A text with a title and one part set off.
pub(crate) struct Marked {
    pub(crate) title: String,
    pub(crate) before: String,
    /// Set off in double brackets; `None` where nothing is.
    pub(crate) marked: Option<String>,
    pub(crate) after: String,
}

impl Marked {
    fn lines(&self) -> Vec<String> {
        let mut text = self.before.clone();
        if let Some(marked) = &self.marked {
            // Spaces stay outside, where lines may break; a token of nothing else is spelt.
            let word = marked.trim_start();
            match word {
                "" => text.push_str(&format!("[[{}]]{marked}", marked.escape_debug())),
                _ => text.push_str(&format!(
                    "{}[[{word}]]",
                    &marked[..marked.len() - word.len()]
                )),
            }
        }
        text.push_str(&self.after);
        wrapped(&text)
    }
}

/// Both texts under their titles, line by line.
pub(crate) fn side_by_side(left: &Marked, right: &Marked) -> String {
    let mut out = row(&left.title, &right.title);
    out.push_str(&row(&"-".repeat(WIDTH), &"-".repeat(WIDTH)));
    let (left, right) = (left.lines(), right.lines());
    for index in 0..left.len().max(right.len()) {
        let cell = |lines: &[String]| lines.get(index).cloned().unwrap_or_default();
        out.push_str(&row(&cell(&left), &cell(&right)));
    }
    out
}

fn row(left: &str, right: &str) -> String {
    let line = format!("{left:<WIDTH$}{GAP}{right}");
    format!("{}\n", line.trim_end())
}

/// `text` in lines of at most [`WIDTH`] characters: broken at spaces, or within a word that is longer.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.split('\n') {
        let mut line = String::new();
        let mut width = 0;
        for word in paragraph.split_inclusive(char::is_whitespace) {
            let count = word.trim_end().chars().count();
            if width > 0 && width + count > WIDTH {
                lines.push(std::mem::take(&mut line));
                width = 0;
            }
            for c in word.chars() {
                if width == WIDTH && c.is_whitespace() {
                    // The end of the line stands for it.
                    continue;
                }
                if width == WIDTH {
                    lines.push(std::mem::take(&mut line));
                    width = 0;
                }
                // A model may write anything, even commands to a terminal.
                line.push(if c.is_control() { ' ' } else { c });
                width += 1;
            }
        }
        lines.push(line);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_at_spaces_and_long_words_anywhere() {
        let words = "aaa ".repeat(20);
        let lines = wrapped(&words);
        assert!(
            lines.iter().all(|line| line.chars().count() <= WIDTH),
            "{lines:?}"
        );
        assert_eq!(lines.concat(), words);
        assert!(lines[0].ends_with("aaa "), "{lines:?}");
        let long = "ö".repeat(100);
        let lines = wrapped(&long);
        assert_eq!((lines.len(), lines.concat()), (3, long));
        assert_eq!(wrapped("a\n\nb\x1b[2J"), ["a", "", "b [2J"]);
    }

    #[test]
    fn the_difference_is_in_brackets_and_its_space_before_them() {
        let text = |title: &str, marked: Option<&str>| Marked {
            title: title.to_owned(),
            before: "It was".to_owned(),
            marked: marked.map(str::to_owned),
            after: " end".to_owned(),
        };
        let both = side_by_side(&text("dense", Some(" a")), &text("lowrank", Some("")));
        let lines: Vec<&str> = both.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("dense ") && lines[0].ends_with("|  lowrank"));
        assert!(lines[2].starts_with("It was [[a]] end "), "{both}");
        assert!(lines[2].ends_with("|  It was[[]] end"), "{both}");
        let newline = side_by_side(&text("a", Some("\n")), &text("b", None));
        assert!(newline.contains("It was[[\\n]]"), "{newline}");
        assert!(!side_by_side(&text("a", None), &text("b", None)).contains('['));
    }
}
