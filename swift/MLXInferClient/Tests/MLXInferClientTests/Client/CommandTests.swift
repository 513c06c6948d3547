import Foundation
import MLXInferClient
import Testing

@testable import mlxinfer_chat

struct CommandTests {
    @Test func whatTheCommandLineSays() throws {
        let words = ["--socket", "/a.sock", "--model", "m", "--max-tokens", "5", "--temperature", "0.5", "What", "is", "this?"]
        let arguments = try Arguments(words)
        #expect(arguments.endpoint == .unix(path: "/a.sock") && arguments.model == "m" && arguments.prompt == "What is this?")
        #expect(arguments.options == SamplingOptions(maxTokens: 5, temperature: 0.5))
        #expect(try Arguments(["--port", "81", "--key", "k"]).endpoint == .tcp(port: 81, apiKey: "k"))
        #expect(try Arguments(["--", "--port"]).prompt == "--port" && Arguments([]).prompt == nil && Arguments(["--help"]).help)
    }

    @Test(arguments: [
        ["--prot", "81"], ["--port"], ["--port", "eighty"], ["--port", "70000"], ["--max-tokens", "1.5"], ["--temperature", "warm"],
        ["--socket", "a", "--port", "1"], ["--key", "k"],
    ])
    func mistakes(_ words: [String]) {
        #expect(throws: Arguments.Mistake.self) { try Arguments(words) }
    }

    @Test func speed() {
        var speed = Speed()
        #expect(speed.summary(Usage(promptTokens: 5, completionTokens: 0)) == "0 tokens")
        speed.piece(after: .milliseconds(250))
        speed.piece(after: .milliseconds(1250))
        let summary = speed.summary(Usage(promptTokens: 5, completionTokens: 21, cachedTokens: 4))
        #expect(summary == "21 tokens, 20.0 tokens/s, 0.25 s to the first, 4 of 5 prompt tokens from the cache")
    }
}
