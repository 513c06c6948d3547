import Testing

@testable import MLXInferClient

@Test func smoke() { #expect(System.pathLimit == 107) }
