package web

// Event is how content is sent to those who follow the page.
var Event = event
