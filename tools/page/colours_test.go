package page

import (
	"cmp"
	"image"
	"image/color"
	"maps"
	"slices"
)

// fewColours returns a picture with the 256 colours that it has most of; of the others each
// becomes the one most like it. A picture of text stays as it is to the eye, and takes a
// third of the space.
func fewColours(picture image.Image) image.Image {
	bounds := picture.Bounds()
	seen := map[color.RGBA]int{}
	at := func(x, y int) color.RGBA {
		r, g, b, _ := picture.At(x, y).RGBA()
		// The two lowest bits are left out: shades that nobody can tell apart are one.
		return color.RGBA{uint8(r>>8) &^ 3, uint8(g>>8) &^ 3, uint8(b>>8) &^ 3, 255}
	}
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			seen[at(x, y)]++
		}
	}
	colours := slices.SortedFunc(maps.Keys(seen), func(a, b color.RGBA) int {
		return cmp.Or(cmp.Compare(seen[b], seen[a]), cmp.Compare(a.R, b.R), cmp.Compare(a.G, b.G), cmp.Compare(a.B, b.B))
	})
	var palette color.Palette
	for _, c := range colours[:min(len(colours), 256)] {
		palette = append(palette, c)
	}
	few := image.NewPaletted(bounds, palette)
	index := map[color.RGBA]uint8{}
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			c := at(x, y)
			i, ok := index[c]
			if !ok {
				i = uint8(palette.Index(c))
				index[c] = i
			}
			few.SetColorIndex(x, y, i)
		}
	}
	return few
}
