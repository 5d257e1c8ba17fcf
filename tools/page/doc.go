// Package page drives the web page in a real Chromium without a display, and makes the
// pictures of docs/images: make page-test. It is a module of its own, so that the product
// does not depend on what drives a browser.
package page
