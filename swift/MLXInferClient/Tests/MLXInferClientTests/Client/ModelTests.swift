import Foundation
import Testing

@testable import MLXInferClient

struct ModelTests {
    @Test func states() async throws {
        let list = #"""
            {"data":[{"id":"a","max_model_len":64,"status":{"value":"loaded"}},{"id":"a:pirate","parent":"a","status":{"value":"loaded"}},
            {"id":"b","max_model_len":0,"status":{"value":"unloaded","failed":true,"reason":"no room"}},
            {"id":"c","status":{"value":"sleeping"}},{"id":"d","status":7},
            {"id":"e","capabilities":["completion","tools","vision"]},{"id":"f","capabilities":7}]}
            """#
        let server = try FaultServer([.read, .send(Transcript.json(list))])
        #expect(
            try await server.client.models() == [
                Model(id: "a", maxTokens: 64, state: .loaded), Model(id: "a:pirate", state: .loaded, base: "a"),
                Model(id: "b", state: .failed(reason: "no room")), Model(id: "c"), Model(id: "d"),
                Model(id: "e", seesImages: true), Model(id: "f"),
            ])
    }

    @Test func loadingAndUnloading() async throws {
        let server = try FaultServer([.read, .send(Transcript.json(#"{"success":true}"#))])
        try await server.client.load("a")
        try await server.client.unload("a:b")
        let requests = server.requests
        #expect(requests[0].hasPrefix("POST /models/load HTTP/1.1\r\n") && requests[0].hasSuffix(#"{"model":"a"}"#))
        #expect(requests[1].hasPrefix("POST /models/unload HTTP/1.1\r\n") && requests[1].hasSuffix(#"{"model":"a:b"}"#))
    }

    @Test func counting() async throws {
        let server = try FaultServer([.read, .send(Transcript.json(#"{"input_tokens":31}"#))])
        #expect(try await server.client.countTokens([.system("Be brief."), .user("Hi"), .assistant("Ho")]) == 31)
        let messages = #"[{"role":"user","content":"Hi"},{"role":"assistant","content":"Ho"}]"#
        #expect(server.requests[0].hasSuffix(#"{"model":"tiny","messages":\#(messages),"system":"Be brief."}"#))
    }

    @Test func countingPictures() async throws {
        let server = try FaultServer([.read, .send(Transcript.json(#"{"input_tokens":99}"#))])
        let parts: [ContentPart] = [.attachment(data: Data([1, 2, 3]), mimeType: "image/png"), .text("Hi")]
        #expect(try await server.client.countTokens([.user(parts)]) == 99)
        let image = #"{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AQID"}}"#
        #expect(server.requests[0].hasSuffix(#"[{"role":"user","content":[\#(image),{"type":"text","text":"Hi"}]}]}"#))
    }

    @Test func vectors() async throws {
        let numbers: [Float] = [1, -0.5, 3.25e-3]
        let bytes = numbers.flatMap { number in withUnsafeBytes(of: number.bitPattern.littleEndian) { Array($0) } }
        let text = Data(bytes).base64EncodedString()
        let rows = #"{"index":1,"embedding":"\#(text)"},{"index":0,"embedding":"AAAAAAAAAAAAAAAA"}"#
        let server = try FaultServer([.read, .send(Transcript.json(#"{"data":[\#(rows)]}"#))])
        let request = EmbeddingRequest(["a", "b"], dimensions: 3, purpose: .query)
        #expect(try await server.client.embed(request) == [[0, 0, 0], numbers])
        let body = #"{"model":"tiny","input":["a","b"],"encoding_format":"base64","dimensions":3,"input_type":"query"}"#
        #expect(server.requests[0].hasSuffix(body))
        await #expect(throws: MLXInferError.protocolViolation("2 vectors came for 1 texts")) { try await server.client.embed(["a"]) }
    }

    @Test func availability() async throws {
        let path = FaultServer.freshPath()
        let health = Transcript.json(#"{"status":"ok"}"#)
        var looks = Client(.unix(path: path)).availability(every: .milliseconds(5)).makeAsyncIterator()
        #expect(await looks.next() == false)
        var server: FaultServer? = try FaultServer([.read, .send(health)], path: path)
        #expect(await looks.next() == true && server != nil)
        server = nil
        #expect(await looks.next() == false)
    }
}
