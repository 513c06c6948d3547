import Testing

@testable import MLXInferClient

struct RequestTests {
    @Test func aRequestAsItIsSent() throws {
        let request = Request(method: "POST", path: "/v1/x", accept: "text/event-stream", body: "{}".bytes)
        let text = String(decoding: try request.bytes(host: "localhost", apiKey: "secret"), as: UTF8.self)
        #expect(
            text == """
                POST /v1/x HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\nUser-Agent: MLXInferClient\r\nConnection: close\r
                Authorization: Bearer secret\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}
                """)
    }

    @Test(arguments: ["a\r\nX: y", "a\n", "\u{0}", "gr\u{FC}n"])
    func aKeyCannotAddToTheHeader(_ key: String) {
        #expect(throws: MLXInferError.self) { try Request(path: "/").bytes(host: "localhost", apiKey: key) }
        #expect(throws: MLXInferError.self) { try Request(path: "/").bytes(host: key, apiKey: nil) }
    }
}
