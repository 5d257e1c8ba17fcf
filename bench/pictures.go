package main

import (
	"image/color"
	"os"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Colours that people who see few can tell apart (Okabe and Ito's).
var lineColors = map[string]color.Color{
	"onejob": color.RGBA{R: 0, G: 114, B: 178, A: 255},
	"river":  color.RGBA{R: 213, G: 94, B: 0, A: 255},
}

// panels are what a picture of pressure shows, one below the other.
var panels = []struct {
	title string
	log   bool // the axis is logarithmic
	lines []panelLine
}{
	{"tasks/s", false, []panelLine{{"", func(s pressedSample) float64 { return s.Rate }}}},
	{"pick-up, ms", true, []panelLine{{"p50", func(s pressedSample) float64 { return s.P50 }}, {"p99", func(s pressedSample) float64 { return s.P99 }}}},
	{"unfinished tasks", true, []panelLine{{"", func(s pressedSample) float64 { return float64(s.Waiting) }}}},
	{"dead rows", false, []panelLine{{"", func(s pressedSample) float64 { return float64(s.DeadRows) }}}},
	{"tables and indexes, MB", false, []panelLine{{"", func(s pressedSample) float64 { return s.MB }}}},
}

type panelLine struct {
	name  string
	value func(pressedSample) float64
}

// drawPressure draws what the subjects did under one pressure. Dotted lines show when it began
// and ended, in the colour of the subject.
func drawPressure(path, title string, found map[string]*pressedOutcome) error {
	const width, height = 18 * vg.Centimeter, 5 * vg.Centimeter
	rows := make([][]*plot.Plot, len(panels))
	for i, panel := range panels {
		p := plot.New()
		rows[i] = []*plot.Plot{p}
		p.Y.Label.Text = panel.title
		p.Add(plotter.NewGrid())
		if i == 0 {
			p.Title.Text = title
		}
		if i == len(panels)-1 {
			p.X.Label.Text = "seconds"
		}
		if panel.log {
			p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		}
		for _, s := range pressedSubjects {
			o := found[s.name]
			if o == nil {
				continue
			}
			for j, line := range panel.lines {
				points := make(plotter.XYs, 0, len(o.Samples))
				for _, sample := range o.Samples {
					y := line.value(sample)
					if panel.log && y <= 0 {
						continue
					}
					points = append(points, plotter.XY{X: sample.At, Y: y})
				}
				if len(points) == 0 {
					continue
				}
				drawn, err := plotter.NewLine(points)
				if err != nil {
					return err
				}
				drawn.Color, drawn.Width = lineColors[s.name], vg.Points(1.2)
				name := s.name
				if line.name != "" {
					name += " " + line.name
				}
				if j > 0 {
					drawn.Dashes = []vg.Length{vg.Points(3), vg.Points(2)}
				}
				p.Add(drawn)
				p.Legend.Add(name, drawn)
			}
		}
		p.Legend.Top, p.Legend.Left = true, true
		p.Legend.Padding, p.Legend.XOffs = vg.Points(2), vg.Points(6)
		switch { // a logarithmic axis needs a range
		case !panel.log:
			p.Y.Min = 0
		case p.Y.Min > p.Y.Max: // there is nothing on it
			p.Y.Min, p.Y.Max = 1, 10
		default:
			p.Y.Max = max(p.Y.Max, 10*p.Y.Min)
		}
		if err := mark(p, found); err != nil {
			return err
		}
	}
	canvas := vgsvg.New(width, height*vg.Length(len(panels)))
	tiles := draw.Tiles{Rows: len(panels), Cols: 1, PadY: vg.Points(6), PadTop: vg.Points(4), PadRight: vg.Points(8), PadBottom: vg.Points(2), PadLeft: vg.Points(2)}
	for i, row := range plot.Align(rows, tiles, draw.New(canvas)) {
		rows[i][0].Draw(row[0])
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = canvas.WriteTo(file)
	return err
}

// mark marks the beginning and the end of the pressure, in each subject's colour.
func mark(p *plot.Plot, found map[string]*pressedOutcome) error {
	low, high := p.Y.Min, p.Y.Max
	for _, s := range pressedSubjects {
		o := found[s.name]
		if o == nil {
			continue
		}
		for _, at := range []float64{o.BeganAt, o.EndedAt} {
			line, err := plotter.NewLine(plotter.XYs{{X: at, Y: low}, {X: at, Y: high}})
			if err != nil {
				return err
			}
			line.Color, line.Width, line.Dashes = lineColors[s.name], vg.Points(0.6), []vg.Length{vg.Points(1), vg.Points(2)}
			p.Add(line)
		}
	}
	return nil
}
